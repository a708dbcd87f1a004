"""How the ranks of a world find each other, and who started this process."""
