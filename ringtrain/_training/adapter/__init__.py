"""What every framework's adapter is made of: exported names, adjoints, counters, checks."""
