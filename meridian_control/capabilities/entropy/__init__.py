"""Rules that end thinking by EAT, RPDI and the end marker's rank, and soft close."""
