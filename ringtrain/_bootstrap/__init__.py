"""init and shutdown: chooses a rendezvous, opens a world, and belongs to an elastic job."""
