/* The protocol of native/agree/negotiator.cc for Spin: N ranks, T names, at most F crashes, every interleaving.
 *
 * A rank submits its names in any order (READY), runs what it is told (RUN), says GOODBYE and ends when ALL have. The coordinator,
 * rank 0's other half, counts members by name, decides one order, and tells all. A crash at any point is seen by whatever the
 * host releases, which this model delivers as GONE; the answer is ABORT to all. Checked: all ranks run the names in one order,
 * nobody runs what a member has not submitted, no end state but the right ones (no deadlock), with and without crashes.
 *
 * -D names one of the faults that tests/spin/test_spin.py plants: IGNORES_GONE, LEAVES_SILENTLY, SKIPS_A_NAME, SURVIVES_ABORT,
 * COUNTS_MESSAGES, TELLS_ALL_BUT_ONE.
 */
#ifndef N
#define N 3
#endif
#ifndef T
#define T 2
#endif
#ifndef F
#define F 1
#endif
#define NONE 255

mtype = { READY, GOODBYE, GONE, RUN, ALL, ABORT };

chan to_coordinator = [N * (T + 3)] of { mtype, byte, byte };  /* what, rank, name */
chan to_rank[N] = [T + 3] of { mtype, byte };                  /* what, name */

byte order[T] = NONE;   /* the names in the coordinator's order */
byte decided = 0;
bool submitted[N * T];  /* by rank and name: what the coordinator may count on */
byte crashes = 0;

proctype Rank(byte me; chan told) {
  byte ran = 0, sent = 0, name;
  bool mine[T];
  xr told;  /* nobody else reads it, so that Spin need not try in which order others run meanwhile: a seventh of the states */

  do
  :: sent < T ->
     if
     :: !mine[0] -> name = 0
     :: T > 1 && !mine[1 % T] -> name = 1 % T
     :: T > 2 && !mine[2 % T] -> name = 2 % T
     fi;
#ifdef SKIPS_A_NAME
     if
     :: me == N - 1 && name == T - 1 -> skip
     :: else -> atomic { submitted[me * T + name] = true; to_coordinator ! READY, me, name }
     fi;
#else
     atomic { submitted[me * T + name] = true; to_coordinator ! READY, me, name };
#endif
#ifdef COUNTS_MESSAGES
     if
     :: me == N - 1 -> to_coordinator ! READY, me, name  /* a message twice, as a retry would */
     :: else
     fi;
#endif
     mine[name] = true;
     sent++
  :: told ? RUN, name ->
     assert(mine[name]);
     assert(order[ran] == name);
     ran++
  :: told ? ABORT, _ -> goto ended
  :: sent == T && ran == T -> break
  :: atomic { crashes < F -> crashes++ }; goto crashed
  od;

#ifndef LEAVES_SILENTLY
  to_coordinator ! GOODBYE, me, 0;
#endif
  do
  :: told ? ALL, _ -> goto ended
  :: told ? ABORT, _ -> goto ended
  :: atomic { crashes < F -> crashes++ }; goto crashed
  od;

crashed:
  to_coordinator ! GONE, me, 0;
ended:
  skip
}

proctype Coordinator() {
  byte count[T], goodbyes = 0, rank, name, other;
  xr to_coordinator;

  do
  :: to_coordinator ? READY, rank, name ->
     count[name]++;
     if
     :: count[name] == N ->
        atomic {
          for (other : 0 .. N - 1) { assert(submitted[other * T + name]) }
          order[decided] = name;
          decided++;
          for (other : 0 .. N - 1) {
#ifdef TELLS_ALL_BUT_ONE
            if
            :: other == N - 1 && name == 0 -> skip
            :: else -> to_rank[other] ! RUN, name
            fi
#else
            to_rank[other] ! RUN, name
#endif
          }
        }
     :: else
     fi
  :: to_coordinator ? GOODBYE, rank, name ->
     goodbyes++;
     if
     :: goodbyes == N -> atomic { for (other : 0 .. N - 1) { to_rank[other] ! ALL, 0 } }; break
     :: else
     fi
  :: to_coordinator ? GONE, rank, name ->
#ifndef IGNORES_GONE
     atomic { for (other : 0 .. N - 1) { to_rank[other] ! ABORT, 0 } };
#ifndef SURVIVES_ABORT
     break
#endif
#endif
  od
}

init {
  byte rank;
  atomic {
    run Coordinator();
    for (rank : 0 .. N - 1) { run Rank(rank, to_rank[rank]) }
  }
}
