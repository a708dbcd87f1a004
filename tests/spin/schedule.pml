/* A schedule of native/agree/schedule.h for Spin: N ranks, T batches, every interleaving of promises, of what ranks know of each
 * other's, and of deviations of any of them.
 *
 * A rank promises the next batch (its counter rises), learns a counter of another rank at any later time, starts a batch when the
 * counters that it knows have passed it, and may deviate at any moment. The coordinator, rank 0's other half, has all promise no
 * more, and ends the schedule at the least counter. Checked: no rank has started what lies beyond the end, all run up to it, nothing
 * is started that not all have promised, and no end state but the right one.
 *
 * -D names one of the faults that tests/spin/test_spin.py plants: TRUSTS_ONE_COUNTER, ENDS_EARLY, PROMISES_ON, STARTS_ALONE,
 * ANSWERS_NOT.
 */
#ifndef N
#define N 3
#endif
#ifndef T
#define T 1
#endif

mtype = { HALT, HALTED };

chan to_coordinator = [2 * N] of { byte, byte };  /* rank, counter */
chan to_rank[N] = [2] of { mtype, byte };         /* what, batches */

byte promised[N];
byte known[N * N];   /* by rank and of whom */
byte started[N];
byte end = 255;

#define LEARNS(other) atomic { known[me * N + other] < promised[other] -> known[me * N + other] = promised[other] }
#define KNOWS(other) (known[me * N + other] > started[me])

proctype Rank(byte me) {
  byte other, batches;
  bool frozen = false;

  do
#ifdef PROMISES_ON
  :: promised[me] < T -> promised[me]++
#else
  :: atomic { !frozen && promised[me] < T -> promised[me]++ }
#endif
  :: LEARNS(0)
  :: LEARNS(1)
#if N > 2
  :: LEARNS(2)
#endif
#ifdef STARTS_ALONE
  :: atomic { promised[me] > started[me] ->
#elif N > 2
  :: atomic { KNOWS(0) && KNOWS(1) && KNOWS(2) ->
#else
  :: atomic { KNOWS(0) && KNOWS(1) ->
#endif
       for (other : 0 .. N - 1) { assert(promised[other] > started[me]) }
       assert(started[me] < end);
       started[me]++
     }
  :: !frozen -> frozen = true; to_coordinator ! me, promised[me]  /* it deviates */
  :: to_rank[me] ? HALT, _ ->
     if
     :: !frozen ->
        frozen = true;
#ifdef ANSWERS_NOT
        if
        :: me == N - 1 -> skip
        :: else -> to_coordinator ! me, promised[me]
        fi
#else
        to_coordinator ! me, promised[me]
#endif
     :: else
     fi
  :: to_rank[me] ? HALTED, batches -> break
  od;
  atomic {
    assert(started[me] <= batches && batches <= promised[me]);
    for (other : 0 .. N - 1) { assert(promised[other] >= batches) }
    started[me] = batches
  }
}

proctype Coordinator() {
  byte answers = 0, rank, counter, least = T, other;

  do
  :: answers < N ->
     to_coordinator ? rank, counter;
     answers++;
#ifdef TRUSTS_ONE_COUNTER
     if
     :: rank == 0 -> least = counter
     :: else
     fi;
#else
     if
     :: counter < least -> least = counter
     :: else
     fi;
#endif
     if
     :: answers == 1 -> atomic { for (other : 0 .. N - 1) { to_rank[other] ! HALT, 0 } }
     :: else
     fi
#ifdef ENDS_EARLY
  :: answers > 1 -> break
#endif
  :: answers == N -> break
  od;
  atomic {
    end = least;
    for (other : 0 .. N - 1) { to_rank[other] ! HALTED, least }
  }
}

init {
  byte rank;
  atomic {
    run Coordinator();
    for (rank : 0 .. N - 1) { run Rank(rank) }
  }
}
