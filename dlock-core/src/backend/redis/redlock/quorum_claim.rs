//! Pure: one claim of this client at the nodes of a quorum. The rules are in `quorum.rs`.

use std::time::Duration;

use super::quorum::{AttemptId, NodeReply, NodeRequest, Outcome, QuorumSize, Round};
use crate::claim::{Claim, Grant, Owner};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation};

/// The most tries in one call that differ only in the tokens that they propose.
const PROPOSALS: u32 = 4;
/// The number of a try that stands for all tries of an owner.
const EVERY_TRY: u64 = 9_999_999_999_999_999;

/// A claim at the nodes, for as long as a node may know it.
#[derive(Debug)]
pub(super) struct QuorumClaim {
    quorum: QuorumSize,
    owner: Owner,
    attempt: u64,
    /// The tokens that a majority voted for, unless they were lost.
    grant: Option<Grant>,
    /// The first token that every node would take, as far as is known.
    next: u64,
    /// The tries of this call that differ in their tokens.
    proposals: u32,
    /// The tries in a row whose votes were divided.
    splits: u32,
    /// When a node last told that the lock is free.
    woken: Option<Moment>,
    /// The nodes that may have the lease.
    voted: Vec<bool>,
    /// The nodes that did not answer a request, which may yet be applied.
    doubt: Vec<bool>,
}

impl QuorumClaim {
    /// A claim whose tokens start at `next` or later.
    pub(super) fn new(quorum: QuorumSize, owner: Owner, next: u64) -> Self {
        QuorumClaim {
            quorum,
            owner,
            attempt: 0,
            grant: None,
            next,
            proposals: 0,
            splits: 0,
            woken: None,
            voted: vec![false; quorum.nodes],
            doubt: vec![false; quorum.nodes],
        }
    }

    fn attempt_id(&self) -> AttemptId {
        AttemptId { owner: self.owner, attempt: self.attempt }
    }

    fn round(&self, ask: NodeRequest, sent: Moment, ttl: Duration) -> Round {
        let voted = self.voted.iter().zip(&self.doubt).map(|(voted, doubt)| *voted || *doubt);
        Round::new(self.quorum, ask, sent, ttl, voted.collect())
    }

    /// The first token after those that this claim was given.
    pub(super) fn tokens_end(&self) -> u64 {
        self.grant.map_or(self.next, |grant| self.next.max(end_of(grant)))
    }

    /// Proposes tokens. When they are ahead of the clock there is only one, so that they
    /// never run away from it.
    fn propose(&self, clock: u64, wanted: u32) -> Grant {
        if self.next > clock {
            return Grant { first: self.next, count: 1 };
        }
        Grant { first: clock, count: wanted.max(1) }
    }

    /// Asks for votes, in a try with this number, which is higher than any before. Who was
    /// granted already asks for the same grant again. `clock`: the time of the nodes in
    /// microseconds, as far as is known.
    pub(super) fn acquire(
        &mut self,
        now: Moment,
        clock: u64,
        attempt: u64,
        claim: &Claim,
    ) -> Round {
        if let Some(tokens) = self.grant {
            // Nothing is restored: others may have had the lock since.
            let attempt_id = self.attempt_id();
            let ask = NodeRequest::Renew { attempt_id, tokens, further: None, restore: false };
            return self.round(ask, now, claim.ttl);
        }
        self.attempt = attempt;
        let tokens = self.propose(clock, claim.tokens);
        self.next = self.next.max(tokens.first);
        let ask = NodeRequest::Acquire {
            attempt_id: self.attempt_id(),
            tokens,
            instead_of: claim.instead_of,
        };
        self.round(ask, now, claim.ttl)
    }

    /// Prolongs the lease, with further tokens if the claim wants some. `None` if there is
    /// no lease.
    pub(super) fn renew(&mut self, now: Moment, clock: u64, claim: &Claim) -> Option<Round> {
        let tokens = self.grant?;
        self.next = self.tokens_end();
        let further = (claim.tokens > 0).then(|| self.propose(clock, claim.tokens));
        if let Some(further) = further {
            self.next = end_of(further); // proposed once
        }
        let ask =
            NodeRequest::Renew { attempt_id: self.attempt_id(), tokens, further, restore: true };
        Some(self.round(ask, now, claim.ttl))
    }

    /// Gives everything back.
    pub(super) fn release(&mut self, now: Moment, ttl: Duration) -> Round {
        self.round(NodeRequest::Release { attempt_id: self.attempt_id() }, now, ttl)
    }

    /// The claim of an owner that is not known here: whatever it has is given back.
    pub(super) fn unknown(quorum: QuorumSize, owner: Owner) -> Self {
        let mut claim = Self::new(quorum, owner, 0);
        claim.attempt = EVERY_TRY;
        claim.voted.fill(true);
        claim
    }

    /// A round that was not planned here, of a claim that is over.
    pub(super) fn round_of(&self, ask: NodeRequest, ttl: Duration) -> Round {
        self.round(ask, Moment::default(), ttl)
    }

    /// Learns from what a node said, decided or not.
    pub(super) fn learn(&mut self, round: &Round, node: usize, reply: &NodeReply) {
        match reply {
            NodeReply::HeldByOther { next, .. }
            | NodeReply::Yielded { next }
            | NodeReply::TokenTooLow { next } => {
                self.next = self.next.max(*next);
            }
            NodeReply::NoReply(_) => self.doubt[node] = true,
            _ => {}
        }
        if round.attempt_id() == self.attempt_id() {
            match (&round.ask, reply) {
                (
                    NodeRequest::Acquire { .. } | NodeRequest::Renew { .. },
                    NodeReply::Accepted { .. },
                ) => {
                    self.voted[node] = true;
                }
                (
                    NodeRequest::Renew { .. },
                    NodeReply::HeldByOther { .. }
                    | NodeReply::TokenTooLow { .. }
                    | NodeReply::NoLease,
                )
                | (
                    NodeRequest::Undo { .. } | NodeRequest::Release { .. },
                    NodeReply::Accepted { .. } | NodeReply::NoLease,
                ) => {
                    self.voted[node] = false;
                }
                _ => {}
            }
        }
    }

    /// Acts on what came of a round of this claim, and returns what its caller is told:
    /// [`Outcome::Again`] only if another try may help.
    pub(super) fn settle(&mut self, round: &Round, outcome: Outcome) -> Outcome {
        if round.attempt_id() != self.attempt_id() {
            return outcome;
        }
        match (&round.ask, outcome) {
            (NodeRequest::Acquire { .. }, Outcome::Granted(grant)) => {
                (self.proposals, self.splits) = (0, 0);
                self.grant = Some(grant);
                self.next = self.next.max(end_of(grant));
                Outcome::Granted(grant)
            }
            (NodeRequest::Acquire { .. }, Outcome::Again) => {
                self.proposals += 1;
                if self.proposals < PROPOSALS {
                    return Outcome::Again;
                }
                self.proposals = 0;
                Outcome::NoMajority(Error::new(ErrorKind::Unavailable, Operation::Acquire).with_message(
                    "the clocks of the nodes differ by more than 4 s, so they do not agree on a token; synchronize them",
                ))
            }
            (
                NodeRequest::Acquire { .. },
                outcome @ (Outcome::Taken { .. } | Outcome::Split { .. }),
            ) => {
                self.voted.fill(false); // they are taken back
                let split = matches!(outcome, Outcome::Split { .. });
                self.splits = if split { self.splits + 1 } else { 0 };
                outcome
            }
            (NodeRequest::Renew { .. }, Outcome::Extended(grant)) => {
                self.grant = Some(grant);
                Outcome::Extended(grant)
            }
            (NodeRequest::Renew { .. }, Outcome::Lost) => {
                self.grant = None;
                Outcome::Lost
            }
            (_, outcome) => outcome,
        }
    }

    /// A node told that the lock is free.
    pub(super) fn wake(&mut self, now: Moment) {
        self.woken = Some(now);
    }

    /// Whether a node told so after a round was sent, so that its answers may be old.
    pub(super) fn was_woken_since(&self, round: &Round) -> bool {
        self.woken.is_some_and(|woken| woken >= round.sent())
    }

    /// How many tries in a row had divided votes.
    pub(super) fn splits(&self) -> u32 {
        self.splits
    }

    /// The nodes that never answered a request, so that what takes it back must be repeated.
    pub(super) fn in_doubt(&self) -> Vec<usize> {
        (0..self.doubt.len()).filter(|node| self.doubt[*node]).collect()
    }

    pub(super) fn grant(&self) -> Option<Grant> {
        self.grant
    }
}

/// The first token after a grant.
fn end_of(grant: Grant) -> u64 {
    grant.first + u64::from(grant.count)
}
