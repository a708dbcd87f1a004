"""Faults planted into copies of what decides in an elastic job, to show that its simulation finds such faults.

tests/native/transaction_test.cc has what only a rare meeting of faults would show: to whom a window is dealt that was settled
twice. Two lie in the simulated driver (tests/simulation/elastic/rank.cc), where a rank's driver thread will have the same lines.
"""

from __future__ import annotations

from mutants import Mutant

CORE, ELASTIC = "native/core/", "tests/simulation/elastic/"
TRANSACTION, MEMBERSHIP, AUTHORITY = CORE + "transaction.cc", CORE + "membership.cc", CORE + "authority.cc"
RANK = ELASTIC + "rank.cc"
MUTANTS = [
    # The transaction
    Mutant(
        "released before all are whole",
        TRANSACTION,
        "stage_ != WindowStage::kWhole || !std::all_of(members_.begin(), members_.end(), is_whole)",
        "stage_ != WindowStage::kWhole || (members_.size() > 1 && whole_.size() < 2)",
    ),
    Mutant(
        "whole is counted, not by rank",
        TRANSACTION,
        "  whole_[peer] = std::max(whole_[peer], step);",
        "for (const Uid& other : members_) if (step > whole_[other] && (peer == me_ || other != me_)) { whole_[other] = step; break; }",
    ),
    Mutant("the divisor of the old world", TRANSACTION, "dealt_.size() - gone_.size()", "dealt_.size()"),
    Mutant(
        "positions are given back twice",
        TRANSACTION,
        "unused.push_back(range)",
        "unused.push_back(range), unused.push_back(range)",
    ),
    Mutant("positions are not given back", TRANSACTION, "  order_.GiveBack(unused);", ";"),
    Mutant(
        "a kept input is freed at whole",
        TRANSACTION,
        "  stage_ = WindowStage::kWhole;",
        "  stage_ = WindowStage::kWhole; operations_.clear();",
    ),
    Mutant(
        "a pause is not told to the others",
        TRANSACTION,
        "transaction_effect::TellWhole{released_ + 1, asked_to_pause_}",
        "transaction_effect::TellWhole{released_ + 1, false}",
    ),
    # The verdict
    Mutant(
        "the verdict of one report",
        TRANSACTION,
        "std::all_of(survivors.begin(), survivors.end(), any(WindowStage::kWhole))",
        "std::any_of(survivors.begin(), survivors.end(), any(WindowStage::kWhole))",
    ),
    Mutant(
        "a step that somebody has released is done again",
        TRANSACTION,
        "newest = std::max(newest, survivor.released)",
        "newest = &survivor == &survivors[0] ? survivor.released : std::min(newest, survivor.released)",
    ),
    # The rank
    Mutant(
        "release or redo is decided by each rank",
        MEMBERSHIP,
        "holds_state() && !transaction_->Settle(form.settlement, UidsOf(form.members), &effects)",
        "holds_state() && !transaction_->Settle(ringtrain::Settle({transaction_->Stop()}), UidsOf(form.members), &effects)",
    ),
    Mutant(
        "a joiner has formed without the state",
        MEMBERSHIP,
        "(joins_ && !donors_.empty())",
        "false",
    ),
    Mutant(
        "what another rank sends is taken in any epoch",
        MEMBERSHIP,
        "state_ == State::kMember && epoch == epoch_",
        "state_ == State::kMember && epoch.count <= epoch_.count",
    ),
    Mutant(
        "notice ends a rank before release",
        MEMBERSHIP,
        "Send(Of(ControlType::kLeave), actions);",
        "Finished(actions);",
    ),
    Mutant(
        "a rank outlives its launcher",
        MEMBERSHIP,
        "now - heard_ >= options_.grace",
        "false",
    ),
    # The authority
    Mutant(
        "the count is not written before Form",
        AUTHORITY,
        "  actions->push_back(authority_action::Write{form.Encode()});",
        ";",
    ),
    Mutant(
        "resumed without + 1",
        AUTHORITY,
        "!ControlFrame::Decode(record, &form)",
        "!ControlFrame::Decode(record, &form) || (--form.epoch.count, false)",
    ),
    Mutant("a joiner counts as a donor", MEMBERSHIP, "peer_joins && !joins_", "peer != me_.uid"),
    Mutant(
        "a joiner is ranked first",
        AUTHORITY,
        "  for (const Uid& uid : newcomers) world_.push_back({ranks_.at(uid).process, begun_});",
        "  for (const Uid& uid : newcomers) world_.insert(world_.begin(), {ranks_.at(uid).process, begun_});",
    ),
    Mutant(
        "a joiner is admitted to an open window",
        AUTHORITY,
        "  if (!settlement.fresh) newcomers.clear();",
        ";",
    ),
    Mutant(
        "silence is taken as attested",
        AUTHORITY,
        "SomebodyIsHeard(now) ? options_.silence : options_.grace + kSlack",
        "SomebodyIsHeard(now) ? kSecond / 2 : options_.grace + kSlack",
    ),
    Mutant(
        "a second death during Stop is ignored",
        AUTHORITY,
        "  ranks_.erase(found);",
        "  if (phase_ != Phase::kStopping) ranks_.erase(found);",
    ),
    Mutant(
        "a death while a world forms is ignored",
        AUTHORITY,
        "alive && InWorld(uid)",
        "alive && phase_ == Phase::kRunning && InWorld(uid)",
    ),
    Mutant(
        "the smaller side goes on",
        AUTHORITY,
        "unheard.at(uid) >= unheard.at(*most)",
        "unheard.at(uid) < unheard.at(*most)",
    ),
    Mutant("both sides of a cut go on", AUTHORITY, "!cuts_.empty()", "false"),
    Mutant(
        "a world goes on below the minimum",
        AUTHORITY,
        "static_cast<int>(voters.size() + newcomers.size()) < enough",
        "false",
    ),
    Mutant("an evicted rank is taken for a new one", AUTHORITY, "lost || (rank.holds_state && !InWorld(uid))", "false"),
    Mutant("whoever forgets to report is waited for", AUTHORITY, "now - since_ >= patience", "false"),
    Mutant("a rank with another program is admitted", AUTHORITY, "rank.program != program_", "false"),
    Mutant(
        "a launcher that comes back stops the world",
        AUTHORITY,
        "cuts_.empty() && living.size() == world_.size()",
        "false",
    ),
    # The driver
    Mutant(
        "the response cache survives the epoch",
        RANK,
        "  protocol_ = std::make_unique<Protocol>(world_, options_);",
        "if (!protocol_) protocol_ = std::make_unique<Protocol>(world_, options_);",
    ),
    Mutant(
        "the epoch is checked in frames, not in messages",
        RANK,
        "return membership_.WhenToTake(message.epoch);",
        "return message.kind == Message::kFrame ? membership_.WhenToTake(message.epoch) : Membership::Arrival::kTake;",
    ),
]
