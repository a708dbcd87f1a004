"""``get_env_rank_and_size``, as Horovod's own tests import it."""

from ringtrain._binding import options
from ringtrain._rendezvous import launcher


def get_env_rank_and_size() -> tuple[int, int]:
    """Rank and size of the job that this process was started in, whoever did; 0 and 1 outside of one."""
    environment = options.environment()
    found = launcher.find_introduced(environment) or launcher.find(environment)
    return (0, 1) if found is None else (found.rank or 0, found.size or 1)
