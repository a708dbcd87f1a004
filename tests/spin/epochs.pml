/* The change of epochs (native/core/authority.cc, membership.cc, transaction.cc) for Spin: N ranks and the authority, S windows, at most F
 * crashes, every interleaving.
 *
 * A rank becomes whole for a window, tells the others, and releases it when all members of its epoch have told. A crash is told to the
 * authority, which stops the newest world, takes the reports of those who live, settles, writes the next count down, forms, and lets it
 * go once all have formed. A rank settles at the Form. Checked: all members run an epoch at the same step (E1), no step that anybody has
 * released is undone or skipped (E2), counts rise and each is written before it is granted (E5), no end state but the right ones.
 *
 * -D names one of the faults that tests/spin/test_spin.py plants: RELEASES_EARLY, TRUSTS_ONE_REPORT, REUSES_THE_COUNT, IGNORES_A_DEATH,
 * FORGETS_THE_RELEASED, UNDOES_WHOLE.
 */
#ifndef N
#define N 3
#endif
#ifndef S
#define S 2
#endif
#ifndef F
#define F 1
#endif

mtype = { STOP, FORM, GO, REPORT, FORMED, DEAD, DONE };

chan to_rank[N] = [4] of { mtype, byte, byte };           /* what, epoch, released */
chan to_authority = [4 * N] of { mtype, byte, byte, byte, bool };  /* what, rank, epoch, released, whole */

byte told[N];           /* by rank: for which step it is whole, in the epoch that it runs; a crash leaves what was told */
byte told_in[N];        /* by rank: in which epoch */
byte members_of[8];     /* by epoch: a bit for each member */
byte runs_at[8] = 255;  /* by epoch: the step at which its first member runs it */
byte newest_released = 0;
byte written = 0;
byte crashes = 0;

inline release() {
  assert(released == newest_released || released + 1 == newest_released);
  released++;
  whole = false;
  if
  :: released > newest_released -> newest_released = released
  :: else
  fi
}

#define TOLD(other) (!(members_of[epoch] & (1 << (other))) || (told_in[other] == epoch && told[other] > released))
#ifdef RELEASES_EARLY
#define ALL_TOLD TOLD((me + 1) % N)
#elif N > 2
#define ALL_TOLD TOLD(0) && TOLD(1) && TOLD(2)
#else
#define ALL_TOLD TOLD(0) && TOLD(1)
#endif

proctype Rank(byte me) {
  byte epoch = 0, formed = 0, released = 0, e, r;
  bool whole = false, runs = false;

  do
  :: runs && !whole && released < S -> atomic { whole = true; told[me] = released + 1; told_in[me] = epoch }
  :: runs && whole && ALL_TOLD -> atomic { release() }
  :: to_rank[me] ? STOP, e, r -> runs = false; formed = 0; to_authority ! REPORT, me, e, released, whole
  :: to_rank[me] ? FORM, e, r ->
     atomic {
       if
       :: r == released + 1 -> assert(whole); release()
       :: else -> assert(r == released); whole = false
       fi;
       formed = e
     };
     to_authority ! FORMED, me, e, 0, false
  :: to_rank[me] ? GO, e, r ->
     atomic {
       assert(e == formed && e > epoch);
       epoch = e;
       runs = true;
       assert(runs_at[e] == 255 || runs_at[e] == released);
       if
       :: runs_at[e] == 255 -> runs_at[e] = released; assert(released >= newest_released)
       :: else
       fi
     }
  :: runs && released == S -> to_authority ! DONE, me, epoch, released, false; goto ended
  :: atomic { crashes < F -> crashes++ }; to_authority ! DEAD, me, 0, 0, false; goto ended
  od;
ended:
  skip
}

proctype Authority() {
  byte count = 0, reports = 0, alive = (1 << N) - 1, done = 0, awaited, who, e, r, newest, i, world;
  mtype what;
  bool whole, all_whole;

  /* the first world */
form:
  count++;
#ifdef REUSES_THE_COUNT
  if
  :: count > 1 -> count = 1
  :: else
  fi;
#endif
  assert(count > written);
  written = count;
  atomic {
    world = alive & ~done;
    members_of[count] = world;
    awaited = world;
    for (i : 0 .. N - 1) {
      if
      :: world & (1 << i) -> to_rank[i] ! FORM, count, newest
      :: else
      fi
    }
  };
  do
  :: awaited == 0 -> break
  :: to_authority ? what, who, e, r, whole ->
     if
     :: what == FORMED && e == count -> awaited = awaited & ~(1 << who)
     :: what == DEAD -> alive = alive & ~(1 << who); goto stop
     :: else
     fi
  od;
  atomic {
    for (i : 0 .. N - 1) {
      if
      :: world & (1 << i) -> to_rank[i] ! GO, count, 0
      :: else
      fi
    }
  };
running:
  do
  :: (alive & ~done) == 0 -> goto ended
  :: to_authority ? what, who, e, r, whole ->
     if
     :: what == DEAD && (done & (1 << who)) == 0 ->
        alive = alive & ~(1 << who);
#ifndef IGNORES_A_DEATH
        goto stop
#endif
     :: what == DONE -> done = done | (1 << who)
     :: else
     fi
  od;
stop:
  if
  :: (alive & ~done) == 0 -> goto ended
  :: else
  fi;
  atomic {
    awaited = world & alive & ~done;
    newest = 0;
    reports = 0;
    all_whole = false;
    for (i : 0 .. N - 1) {
      if
      :: awaited & (1 << i) -> to_rank[i] ! STOP, count, 0
      :: else
      fi
    }
  };
  do
  :: awaited == 0 -> break
  :: to_authority ? what, who, e, r, whole ->
     if
     :: what == REPORT && e == count && (awaited & (1 << who)) ->
        awaited = awaited & ~(1 << who);
        atomic {
          all_whole = whole && (reports == 0 || (all_whole && r == newest));
          reports++;
          if
          :: r > newest -> newest = r
          :: else
          fi
        };
#ifdef TRUSTS_ONE_REPORT
        all_whole = whole;
#endif
#ifdef FORGETS_THE_RELEASED
        newest = r;
#endif
     :: what == DEAD -> alive = alive & ~(1 << who); awaited = awaited & ~(1 << who)
     :: what == DONE -> done = done | (1 << who); awaited = awaited & ~(1 << who)
     :: else
     fi
  od;
  if
  :: (alive & ~done) == 0 -> goto ended
#ifdef UNDOES_WHOLE
  :: all_whole -> skip
#else
  :: all_whole -> newest++
#endif
  :: else
  fi;
  goto form;
ended:
  skip
}

init {
  byte rank;
  atomic {
    run Authority();
    for (rank : 0 .. N - 1) { run Rank(rank) }
  }
}
