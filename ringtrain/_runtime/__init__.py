"""One rank at work: its context, requests, operations, process sets, what it tells of itself, and the end of the process."""
