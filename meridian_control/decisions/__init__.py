"""The rules: pure functions of the policy and of the table of live requests. Do no I/O and know no engine."""
