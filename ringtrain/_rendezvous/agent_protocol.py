"""What launcher, agent and rank say to each other: the keys of their JSON objects, one a line.

    launcher -> agent             Request, over the agent's stdin
    agent -> launcher             Answer to a request before the job, RankNews during it, over its stdout
    rank -> agent                 RankNews, over the agent's Unix socket; the agent adds its own and passes it on
    agent -> rank                 Introduce, to one that has said `meets`, over the connection on which it did; Lead, to one
                                  that says `control`
    supervisor of a rank -> agent RankNews, where an MPI's engine starts the ranks
    agent -> supervisor           Welcome, after its length and with two descriptors

All of them are of one release: an agent says first of which edition it is (see `agent.link`), and the launcher takes its own alone.
Times are `time.monotonic()` of the host that says them, in seconds. This file has types alone: agent and supervisor
import it for the type checker only, since they are to start in milliseconds.
"""

from __future__ import annotations

from typing import Literal, TypedDict

# ---- requests ----


class Describe(TypedDict):
    """Before a job: can ranks run on this host? Answered with HostFacts."""

    do: Literal["describe"]
    directory: str  # where the ranks will run
    ranks: int  # how many
    files: list[str]  # which must exist
    command: str  # which they will run, found as by a shell
    environment: dict[str, str]  # over the agent's own
    uses_mpi: bool  # so that HOME must be set
    is_elastic: bool  # so that ranks come in the place of others
    probe: str | None  # a program that says which ringtrain and MPI load there; None on the launcher's host


class Listener(TypedDict):
    """How to listen for the connection test."""

    nonce: str  # in hexadecimal, said to whoever connects
    ports: tuple[int, int]  # first and last; (0, 0) for any
    interfaces: tuple[str, ...]  # names or networks; () for all


class Listen(TypedDict):
    """Before a job on several hosts, and where a host comes to one: listen on every address. Answered with Addresses."""

    do: Literal["listen"]
    listener: Listener


Target = tuple[str, int, str]  # address, port, nonce in hexadecimal


class Connect(TypedDict):
    """Behind Listen: connect to addresses of others. Answered with Reached."""

    do: Literal["connect"]
    targets: list[Target]


class ListenNoMore(TypedDict):
    """The test is over, and the agent serves on."""

    do: Literal["listen no more"]


class FindPort(TypedDict):
    """Before a job: find a port that nobody listens on, for a program of the user's. Answered with FreePort."""

    do: Literal["find port"]
    address: str  # of this host
    ports: tuple[int, int]  # first and last; (0, 0) for any


class TellTime(TypedDict):
    """Answered with Clock."""

    do: Literal["tell time"]


class Serve(TypedDict):
    """The job begins: listen to the ranks of this host, until they have ended. Answered with Serving."""

    do: Literal["serve"]
    socket: str  # name of the agent's socket
    directory: str
    environment: dict[str, str]  # of the ranks
    function: str  # of `ringtrain.run`, pickled, in base64; "" for a command
    patience: float | None  # seconds without a beat after which the launcher is taken for dead; None: never
    grace: float  # seconds for which the ranks go on when it is lost, and another one may take over; 0 for none
    key: str  # of the job, in hexadecimal, which that one must know; "" without a grace
    window: int  # bytes of output that the launcher has room for
    ignored: list[int]  # signals that the ranks start with ignored
    notices: list[str]  # names of the signals by which this host is asked to leave an elastic job; [] in others


class TakeOver(TypedDict):
    """Instead of Serve: the launcher takes up a job whose launcher was lost. Answered with Serving by the agent that serves
    it, whose launcher this one is from then on, or else with Refused."""

    do: Literal["take over"]
    socket: str  # name of that agent's socket
    key: str  # of the job, in hexadecimal
    window: int  # bytes of output that the launcher has room for


class _Start(TypedDict):
    do: Literal["start"]
    line: list[str]  # of each rank's command
    first: int  # rank
    count: int  # of ranks, numbered from there
    size: int  # of the world
    without: list[str]  # variables that begin so are left out, since they are of another engine's job


class Start(_Start, total=False):
    """Start ranks of this host, where no engine does. Comes after Serve; each ends in RankNews with `cleared`."""

    only: list[int]  # places on this host, whose ranks alone are to be started; all without
    variables: dict[str, str]  # of these ranks, beside those of all
    uid: str  # of the process, in an elastic job, where one is started at a time


class _Introduce(TypedDict):
    do: Literal["introduce"]
    ranks: list[int]  # who wanted to meet; [] for all ranks of the job


class Introduce(_Introduce, total=False):
    """All ranks that TCP is to connect have come, or `failure`. The agent passes it to those of its host, as it is."""

    peers: list[str]  # where each of them listens, in the order of their numbers
    secret: str  # of their world, in hexadecimal
    epoch: int  # of their world
    failure: str  # instead: why there is no world, the same words for all
    refusal: str  # instead, and from the agent itself: why this process cannot be the rank


class _Lead(TypedDict):
    do: Literal["lead"]
    uid: str  # of that rank
    frame: str  # for the core, in hexadecimal
    because: str  # for people: why the world ends; "" if it does not


class Lead(_Lead, total=False):
    """A word of the authority of an elastic job. The agent passes it on to the rank that it is for, as it is."""

    listens: str  # where it is to listen for the next world, as in RINGTRAIN_LISTEN; then the frame is ""


class Evict(TypedDict):
    """Kill a rank of an elastic job, which the others go on without."""

    do: Literal["evict"]
    rank: int


class TellStopped(TypedDict):
    """Say of each rank of the host that has not ended whether it is stopped, as `stopped`."""

    do: Literal["tell stopped"]


class Beat(TypedDict):
    """The launcher lives. Answered with Clock."""

    do: Literal["beat"]
    at: float  # on the launcher's clock


class GoOn(TypedDict):
    """The launcher has room for so much more output."""

    do: Literal["go on"]
    bytes: int


class End(TypedDict):
    """Ask the ranks to end, and kill them some seconds later; or kill them now."""

    do: Literal["end", "kill"]


Request = (
    Describe
    | Listen
    | Connect
    | ListenNoMore
    | FindPort
    | TellTime
    | Serve
    | TakeOver
    | Start
    | Introduce
    | Lead
    | Evict
    | TellStopped
    | Beat
    | GoOn
    | End
)


# ---- answers ----


class VisibleGpus(TypedDict):
    """GPUs that a rank sees, and whether CUDA_VISIBLE_DEVICES says so."""

    gpus: int
    gpus_are_chosen: bool


class HostFacts(VisibleGpus, total=False):
    """A host, and what its probe has said. `problem` is what keeps a rank from running there: subject, name, text."""

    name: str
    python: str
    cores: int
    most_ranks: int
    shell: str
    machine: list[str | int]  # what no other machine, or container, has
    problem: list[str]
    package: str  # version of ringtrain, and its native library
    library: str  # path of MPI
    mpi: str  # what MPI says of its version


Listening = tuple[str, str, int, int, int]  # interface, address, prefix length, port, MTU


class Addresses(TypedDict):
    """Where a host listens."""

    addresses: list[Listening]
    left_out: list[str]  # where it does not, since --network-interfaces or --port-range allow none: interface (address)
    name: str
    machine: list[str | int]  # as in HostFacts
    rdma_ports: list[str]  # as UCX calls them


class Reached(TypedDict):
    """For each target "" if the right host answered, in small and in large packets, else why not."""

    reached: list[str]


class FreePort(TypedDict):
    """A port that was free; 0 if there is none."""

    port: int


class _Clock(TypedDict):
    clock: float


class Clock(_Clock, total=False):
    """The host's time, and the launcher's time of the beat that it answers."""

    asked: float


class _Serving(TypedDict):
    serving: Literal[True]


class Serving(_Serving, total=False):
    """The agent waits for its ranks. To a launcher that takes the job up it says what there is."""

    clock: float
    processes: list[tuple[int, str, bool]]  # number of the slot, uid, and whether it is asked to leave
    record: str  # the newest Form that has passed it, in hexadecimal, or ""
    finished: bool  # some program has come to its end here
    noticed: bool  # this host is asked to leave
    ended: list[tuple[int, int]]  # (rank, exit code or -signal) of those whose end no launcher has heard of
    dropped: int  # bytes that ranks have written meanwhile, and that had no room; what had follows


class Refused(TypedDict):
    """This launcher cannot take the job up here."""

    refused: str  # why


Answer = HostFacts | Addresses | Reached | FreePort | Clock | Serving | Refused


# ---- a rank ----


class Arrival(TypedDict):
    """What a rank says as it calls init(), where TCP is to connect the ranks."""

    addresses: str  # where it listens
    ranks: list[int]  # whom it wants to meet, itself among them, ascending; [] for all ranks of the job
    seconds: float  # for which it waits for them


class Welcome(TypedDict):
    """What a rank's supervisor gets to start its command with, where an MPI's engine starts the ranks."""

    environment: dict[str, str]
    directory: str
    ignored: list[int]


class RankNews(TypedDict, total=False):
    """What has become of a rank; each comes with some of these keys, and with `rank`, -1 for what is of no rank any more.

    From the rank's own program the agent and the launcher take `failing`, `leaving`, `segments`, `meets`, `noticed`
    and `control` alone.
    """

    rank: int
    at: float  # when it happened

    # from its supervisor, or from the agent where it has started the rank
    starts: Literal[True]  # with `host`
    host: str  # the name that the host gives itself
    omp_num_threads: int  # that was chosen for it
    group: int  # process group of its command
    ended: int  # exit code, -n for signal n; with `at`, `was_told_to` and `engine_lost_at`
    was_told_to: bool  # the agent had asked for its end
    noticed: int  # the signal by which it is asked to leave an elastic job; from its program and the agent too
    engine_lost_at: float | None  # when the engine's program beside it was gone, unasked
    remains: int  # a process that could not be killed; with `name`; from the agent, too
    name: str

    # from its own program (see `ringtrain._rendezvous.announce`)
    failing: int  # exit code that it is about to return; with `at` and `follows`
    follows: bool  # another rank's failure is the reason
    because: str  # the error that says so, in a line; with `follows`
    leaving: Literal[True]  # it ends with a code that only the end of its process tells; with `at`
    meets: Arrival  # answered with Introduce
    segments: list[tuple[str, int]]  # path and inode of what its MPI has made in /dev/shm
    control: str  # for the authority of an elastic job, in hexadecimal; with `uid`. Lead comes over the same connection
    uid: str  # of the process

    # from the agent
    withdraws: list[int]  # the program that has said `meets` for these ranks has gone without an answer
    cleared: (
        int  # exit code, 128 + n for signal n, of a rank that the agent has started, and of which nothing is left now
    )
    words: str  # what the agent says of what it could not do; rank -1
    stream: int  # 1 or 2: bytes of its output follow
    bytes: int  # so many
    left: str  # a file for `ringtrain.run` follows: "result" or "failure"
    lost: Literal[True]  # its supervisor has vanished without `ended`; with `at`
    stopped: bool  # a signal has stopped it, as SIGSTOP does
