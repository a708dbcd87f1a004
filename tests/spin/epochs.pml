/* The change of epochs (native/elastic/authority.cc, membership.cc, native/elastic/step.cc) for Spin: N ranks and the authority, S windows,
 * at most F crashes, every interleaving.
 *
 * A crash is told to the authority, which stops the newest world, awaits a report of each that lives, writes the next count down, forms,
 * and lets it go once all have formed. In the new world each rank tells how far it is; one that has heard all members settles: it releases
 * the window that all hold, or that somebody has released, or gives its results up. Then it becomes whole for the next window, tells the
 * others, and releases it when all members have told. Checked: all members run an epoch at the same step (E1), no step that anybody has
 * released is undone or skipped (E2), counts rise and each is written before it is granted (E5), no end state but the right ones.
 *
 * -D names one of the faults that tests/spin/test_spin.py plants: RELEASES_EARLY, TRUSTS_ONE_STANDING, REUSES_THE_COUNT, IGNORES_A_DEATH,
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

chan to_rank[N] = [4] of { mtype, byte };               /* what, epoch */
chan to_authority = [4 * N] of { mtype, byte, byte };   /* what, rank, epoch */

byte told[N];           /* by rank: for which step it is whole, in the epoch that it runs; a crash leaves what was told */
byte told_in[N];        /* by rank: in which epoch */
byte released_by[N];    /* by rank: how far it was */
bool whole_at[N];       /* and whether it held the window behind that */
byte stood_in[N];       /* when it came to which epoch */
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

#define IS_IN(other) (members_of[epoch] & (1 << (other)))
#define STANDS(other) (!IS_IN(other) || stood_in[other] == epoch)
#if N > 2
#define ALL_STAND STANDS(0) && STANDS(1) && STANDS(2)
#else
#define ALL_STAND STANDS(0) && STANDS(1)
#endif

/* Of what all members have told. */
inline settle() {
  newest = 0;
  all_whole = true;
  for (i : 0 .. N - 1) {
    if
    :: IS_IN(i) && released_by[i] > newest -> newest = released_by[i]
    :: else
    fi
  }
#ifdef FORGETS_THE_RELEASED
  newest = released;
#endif
  for (i : 0 .. N - 1) {
    if
    :: IS_IN(i) && (released_by[i] != newest || !whole_at[i]) -> all_whole = false
    :: else
    fi
  }
#ifdef TRUSTS_ONE_STANDING
  all_whole = whole && released == newest;
#endif
#ifdef UNDOES_WHOLE
  all_whole = false;
#endif
  newest = newest + all_whole;
  if
  :: newest == released + 1 -> assert(whole); release()
  :: else -> assert(newest == released); whole = false
  fi
}

proctype Rank(byte me) {
  byte epoch = 0, formed = 0, released = 0, e, newest, i;
  bool whole = false, runs = false, settled = false, all_whole;

  do
  :: runs && !settled && ALL_STAND ->
     atomic {
       settle();
       settled = true;
       assert(runs_at[epoch] == 255 || runs_at[epoch] == released);
       if
       :: runs_at[epoch] == 255 -> runs_at[epoch] = released; assert(released >= newest_released)
       :: else
       fi
     }
  :: runs && settled && !whole && released < S -> atomic { whole = true; told[me] = released + 1; told_in[me] = epoch }
  :: runs && settled && whole && ALL_TOLD -> atomic { release() }
  :: to_rank[me] ? STOP, e -> runs = false; formed = 0; to_authority ! REPORT, me, e
  :: to_rank[me] ? FORM, e -> formed = e; to_authority ! FORMED, me, e
  :: to_rank[me] ? GO, e ->
     atomic {
       assert(e == formed && e > epoch);
       epoch = e;
       runs = true;
       settled = false;
       released_by[me] = released;
       whole_at[me] = whole;
       stood_in[me] = e
     }
  :: runs && settled && released == S -> to_authority ! DONE, me, epoch; goto ended
  :: atomic { crashes < F -> crashes++ }; to_authority ! DEAD, me, 0; goto ended
  od;
ended:
  skip
}

proctype Authority() {
  byte count = 0, alive = (1 << N) - 1, done = 0, awaited, who, e, i, world;
  mtype what;

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
      :: world & (1 << i) -> to_rank[i] ! FORM, count
      :: else
      fi
    }
  };
  do
  :: awaited == 0 -> break
  :: to_authority ? what, who, e ->
     if
     :: what == FORMED && e == count -> awaited = awaited & ~(1 << who)
     :: what == DEAD -> alive = alive & ~(1 << who); goto stop
     :: else
     fi
  od;
  atomic {
    for (i : 0 .. N - 1) {
      if
      :: world & (1 << i) -> to_rank[i] ! GO, count
      :: else
      fi
    }
  };
running:
  do
  :: (alive & ~done) == 0 -> goto ended
  :: to_authority ? what, who, e ->
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
    for (i : 0 .. N - 1) {
      if
      :: awaited & (1 << i) -> to_rank[i] ! STOP, count
      :: else
      fi
    }
  };
  do
  :: awaited == 0 -> break
  :: to_authority ? what, who, e ->
     if
     :: what == REPORT && e == count && (awaited & (1 << who)) ->
        awaited = awaited & ~(1 << who)
     :: what == DEAD -> alive = alive & ~(1 << who); awaited = awaited & ~(1 << who)
     :: what == DONE -> done = done | (1 << who); awaited = awaited & ~(1 << who)
     :: else
     fi
  od;
  if
  :: (alive & ~done) == 0 -> goto ended
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
