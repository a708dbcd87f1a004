// Steps: one rank's side of steps that survive a change of the world. Sans-I/O: the ranks of a job and their simulation
// drive it alike.
//
// A window is the operations between two updates of an optimizer; parts of it may be waited for at once. Its inputs are
// kept. When this rank holds every result of a part it is whole, and says so in an exchange of the world; when that
// returns all members are whole, and the part is released: its results may be used. On the way a world may be lost.
// Then the members of the next one tell each other their Standing, Settle makes one answer of all, and each releases
// the part, or submits the kept inputs once more.
//
// That the exchange may reach some of them only, and be held again in another world, changes nothing:
//
//   - Whoever has released a part did so because all members of a world were whole, or because a settlement has said
//     that. So each survivor is whole, with the same results, and every later settlement says release.
//   - Whoever was told to redo it has dropped its results. It becomes whole again only with the inputs of all members
//   of
//     its world, each of which has been told the same. So no two ranks are ever whole by different worlds.
//   - Whoever has begun the next window keeps everybody from joining: ranks that join are told the state between two
//     steps.
//
// Samples are dealt among the members of a world (samples.h). An open window keeps its dealing; those of its shares
// whose rank was lost before it could contribute are dealt again.
#ifndef RINGTRAIN_ELASTIC_STEP_H_
#define RINGTRAIN_ELASTIC_STEP_H_

#include <cstdint>
#include <map>
#include <optional>
#include <variant>
#include <vector>

namespace ringtrain {

// How far a rank is with the part after the last one that it has released.
enum class Stage : int32_t {
  kIdle = 0,   // nothing of its window has been drawn or submitted
  kBegun = 1,  // something has
  kWhole = 2   // and this rank holds every result of the part
};

// What the results of a part are of the open window.
enum class Part : int32_t {
  kNothing = 0,  // they are used within it, and given up
  kSome = 1,     // more will come
  kStep = 2,     // with them an optimizer's step is complete, and so is the window if there is one optimizer
  kLast = 3      // with them it is complete
};

// What a member tells the others when a world begins.
struct Standing {
  bool holds_state = false;  // that the others have; not so before the first world's was given out, and when it joins
  int64_t released = 0;      // parts
  Stage stage = Stage::kIdle;
  int64_t dealt_in = 0;   // number of the world among whose members the open window was dealt, or the next one will be
  bool has_sets = false;  // it knows of process sets that are to go on
};

// What follows for all.
struct Settlement {
  int64_t released = 0;             // on all: who has one less, and is whole, releases it
  std::optional<int64_t> dealt_in;  // of the window that somebody has begun; none if nobody has
  bool releases = false;            // all of them hold a part; what is released with it may be the end of that window
  bool gives_state = false;         // rank 0, to all
  bool renews_sets = false;         // process sets go on
};

// Of the standings of all members. False if somebody has released what another one did not hold, which cannot be.
bool Settle(const std::vector<Standing>& standings, Settlement* settlement);

// Places of a dealing; none: all of them.
using Contributors = std::optional<std::vector<int32_t>>;

// What the driver does, in order, before it goes on.
namespace step_effect {
struct Finish {  // the window has ended: the samples that these places have drawn for it are in it
  Contributors contributors;
};
struct Deal {  // the next window, to so many of a world, of whom this rank is the one at that place
  int64_t world;
  int32_t size, place;
};
struct RefuseUnlike {};  // who joins with other values leaves before the state is given out
struct RenewSets {};
struct TakeState {};  // of rank 0, on all together; then Steps::TookState
}  // namespace step_effect
using StepEffect = std::variant<step_effect::Finish, step_effect::Deal, step_effect::RefuseUnlike,
                                step_effect::RenewSets, step_effect::TakeState>;
using StepEffects = std::vector<StepEffect>;

class Steps {
 public:
  // several: whether more than one optimizer may step in a window, which a part of nothing but kLast ends then.
  explicit Steps(bool several) : several_(several) {}

  // ---- the open window ----
  void Begin();      // something of it is drawn, or submitted
  void BeginPart();  // results of it are asked for
  void Hold(Part part);
  void Drop();  // what is held, since no world can go on
  // All members are whole.
  void Release(StepEffects* effects);
  // Whether there is a window that nothing ends but a part of its own, kLast.
  bool has_end_to_come() const { return has_step_ || is_apart_; }

  // ---- worlds ----
  // This rank is a member of the world with this number, at this place of so many.
  void EnterWorld(int64_t number, int32_t size, int32_t place);
  Standing standing(bool has_sets) const;
  // What all have told, this rank among them. False for what cannot be.
  bool Hear(const std::vector<Standing>& standings);
  // If the settlement names a dealing: this rank's place in it, which it tells the others.
  std::optional<int32_t> place_in_dealing() const;
  // places: of all members in that dealing, if it is named.
  void Settle(const std::vector<int32_t>& places, StepEffects* effects);
  void TookState();

  int64_t released() const { return released_; }
  Stage stage() const { return stage_; }
  // Of the open window: places whose inputs the present world has.
  const Contributors& contributors() const { return contributors_; }

 private:
  struct Place {
    int32_t size, place;
  };
  void DealIn(int64_t world, StepEffects* effects);

  const bool several_;
  bool holds_state_ = false;
  int64_t released_ = 0;
  Stage stage_ = Stage::kIdle;
  Part held_ = Part::kNothing;
  std::map<int64_t, Place> worlds_;  // by number, that a standing may still name
  int64_t world_ = 0;                // the present one
  int64_t dealt_in_ = 0;
  Settlement settlement_;

  // The open window.
  Contributors contributors_;
  Contributors applied_;    // of its first part that was released
  bool has_parts_ = false;  // whether there was one
  bool has_step_ = false;   // whether an optimizer's step was among them
  bool is_apart_ = false;   // whether nothing of it was drawn, or released but kNothing
};

}  // namespace ringtrain
#endif  // RINGTRAIN_ELASTIC_STEP_H_
