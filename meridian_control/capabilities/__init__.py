"""What Meridian does, one folder each."""
