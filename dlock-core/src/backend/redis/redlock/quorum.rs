//! Pure: the rules of a quorum, and one request to all its nodes. The claim that makes such
//! requests is in `quorum_claim.rs`.
//!
//! ```text
//!   acquire --> round --majority says yes in time--> granted --renew--> round --> held
//!      ^          |                                      |
//!      |          | cannot get a majority: the votes are  '--release--> round --> released
//!      '----------' taken back; a new try, or the answer
//! ```
//!
//! - A *round* is one request to all nodes at once. It is decided as soon as the nodes that
//!   have answered decide it, whatever the others say.
//! - A *try* is a round that asks for votes. Every try has a number, higher than those
//!   before, and the nodes keep owner and number: what takes back the votes of one try cannot take those of a later
//!   one. A later try of an owner takes the place of an earlier one.
//! - A vote counts from the moment before the round was sent. A majority that is reached
//!   when the ttl (minus the drift margin) has passed since then is none.
//! - *Tokens* are proposed by the client, so that all nodes keep the same ones. A node has a
//!   register for each key: the last token that it voted for. It votes for tokens that are
//!   above its register and not ahead of its clock by more than [`LEAD`]; then the last of
//!   them is its register. Two majorities have a node in common, so tokens rise.
//! - A *missing register* counts as the clock of the node minus [`SLACK`]. So a register is
//!   kept until the clock has passed it by that much, and needs no longer life: from then on
//!   a missing one counts for more. And a node that lost its registers, by a restart or a
//!   flush, does not vote until the longest ttl, `SLACK` and `LEAD` have passed: then every
//!   lease that it has forgotten is over, and every token is below what its clock counts for.
//! - A *renewal* is a vote too: a node where the lease is missing takes it again if nobody
//!   else has it there, no higher token was voted for, and it has not lost its data (it
//!   might have forgotten a vote for somebody else). So a lock that is held for long
//!   survives that the nodes are restarted one after the other.

use std::sync::Arc;
use std::time::Duration;

use crate::claim::{Grant, Holder, Owner, ReleaseOutcome};
use crate::clock::{Moment, nanos};
use crate::error::{Error, ErrorKind, Operation};

/// By how many microseconds a node's clock must have passed a register before it is
/// forgotten, and how far below its clock tokens may be.
pub(super) const SLACK: u64 = 2_000_000;
/// How many microseconds tokens may be ahead of a node's clock.
pub(super) const LEAD: u64 = 2_000_000;

/// How long a node that has lost its data must not vote.
pub(super) fn silence(longest_ttl: Duration) -> Duration {
    longest_ttl + margin(longest_ttl) + Duration::from_micros(SLACK + LEAD)
}

/// Clocks of two machines may differ by this much in rate: one in fifty.
fn margin(term: Duration) -> Duration {
    Duration::from_nanos(nanos(term) / 50)
}

/// How many nodes there are, and how many of them decide.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuorumSize {
    pub(super) nodes: usize,
    pub(super) majority: usize,
    #[cfg(test)]
    pub(super) counted_from_reply: bool,
    /// A node that answers twice has two votes.
    #[cfg(test)]
    pub(super) counts_answers: bool,
}

impl QuorumSize {
    pub(super) fn of(nodes: usize) -> Self {
        QuorumSize {
            nodes,
            majority: nodes / 2 + 1,
            #[cfg(test)]
            counted_from_reply: false,
            #[cfg(test)]
            counts_answers: false,
        }
    }
}

/// Names one try of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AttemptId {
    pub(super) owner: Owner,
    /// Rises with each try of the client.
    pub(super) attempt: u64,
}

/// The request that a round sends to all nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeRequest {
    /// Vote for this try, after giving up the lease of another owner.
    Acquire { attempt_id: AttemptId, tokens: Grant, instead_of: Option<Owner> },
    /// Prolong the lease, and let it have further tokens if nobody waits. With `restore`, a
    /// node that does not have the lease takes it again.
    Renew { attempt_id: AttemptId, tokens: Grant, further: Option<Grant>, restore: bool },
    /// Take back the votes for this try and earlier ones.
    Undo { attempt_id: AttemptId },
    /// The same, and the place among those who wait.
    Release { attempt_id: AttemptId },
}

/// The reply of a node.
#[derive(Clone, Debug)]
pub(super) enum NodeReply {
    /// It voted, prolonged or released.
    Accepted { others_wait: bool, extended: bool },
    /// It does not have the lease, so there was nothing to renew or release.
    NoLease,
    /// Somebody else has its vote.
    HeldByOther { by: AttemptId, next: u64, free_in: Duration, holder: Option<Arc<Holder>> },
    /// Others wait, so the lease was given up and no vote was given.
    Yielded { next: u64 },
    /// The tokens are not above its register.
    TokenTooLow { next: u64 },
    /// The tokens are too far ahead of its clock.
    TokenTooHigh,
    /// It has lost its data and does not vote yet.
    NotVoting { yet: Duration },
    /// It refused, and nothing was done.
    Refused(Error),
    /// It did not answer, so the request may have been applied, or may yet be.
    NoReply(Error),
}

/// What came of a round.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    Granted(Grant),
    /// Somebody holds it. The time until a majority may be free.
    Taken {
        holder: Option<Arc<Holder>>,
        free_in: Option<Duration>,
    },
    /// The votes are divided, or came too late: to be tried again after a random pause.
    Split {
        holder: Option<Arc<Holder>>,
    },
    /// Other tokens must be proposed.
    Again,
    Held {
        others_wait: bool,
    },
    Extended(Grant),
    Lost,
    Released(ReleaseOutcome),
    /// Too few nodes answer.
    NoMajority(Error),
}

/// One request to all nodes.
#[derive(Debug)]
pub(super) struct Round {
    quorum: QuorumSize,
    pub(super) ask: NodeRequest,
    /// The moment before it was sent.
    sent: Moment,
    ttl: Duration,
    replies: Vec<Option<NodeReply>>,
    /// For a release: the nodes that may have the lease.
    voted: Vec<bool>,
    decided: bool,
    /// Votes of nodes that had voted already.
    #[cfg(test)]
    repeated: usize,
}

impl Round {
    /// A round of all nodes; `voted` are those that may have the lease.
    pub(super) fn new(
        quorum: QuorumSize,
        ask: NodeRequest,
        sent: Moment,
        ttl: Duration,
        voted: Vec<bool>,
    ) -> Self {
        let replies = vec![None; quorum.nodes];
        Round {
            quorum,
            ask,
            sent,
            ttl,
            replies,
            voted,
            decided: false,
            #[cfg(test)]
            repeated: 0,
        }
    }

    /// Takes what a node says, and tells what came of the round when that decides it.
    /// Afterwards it is only remembered.
    pub(super) fn on_reply(
        &mut self,
        now: Moment,
        node: usize,
        reply: NodeReply,
    ) -> Option<Outcome> {
        #[cfg(test)]
        if let (Some(NodeReply::Accepted { .. }), NodeReply::Accepted { .. }) =
            (&self.replies[node], &reply)
        {
            self.repeated += 1;
        }
        self.replies[node] = Some(reply);
        if self.decided {
            return None;
        }
        let outcome = match self.ask {
            NodeRequest::Acquire { tokens, .. } => self.acquired(now, tokens),
            NodeRequest::Renew { further, .. } => self.renewed(further),
            NodeRequest::Undo { .. } => None,
            NodeRequest::Release { .. } => self.released(),
        };
        self.decided = outcome.is_some();
        outcome
    }

    pub(super) fn attempt_id(&self) -> AttemptId {
        match self.ask {
            NodeRequest::Acquire { attempt_id, .. }
            | NodeRequest::Renew { attempt_id, .. }
            | NodeRequest::Undo { attempt_id }
            | NodeRequest::Release { attempt_id } => attempt_id,
        }
    }

    /// The moment before it was sent.
    pub(super) fn sent(&self) -> Moment {
        self.sent
    }

    /// Whether the answer of a node would still matter.
    #[cfg(test)]
    pub(super) fn awaits(&self, node: usize) -> bool {
        !self.decided && self.replies[node].is_none()
    }

    /// Whether a node may have had the lease before this round.
    pub(super) fn had_vote_of(&self, node: usize) -> bool {
        self.voted[node]
    }

    /// The nodes that may have voted.
    pub(super) fn may_have_voted(&self) -> impl Iterator<Item = usize> + '_ {
        let may = |reply: &Option<NodeReply>| {
            matches!(reply, None | Some(NodeReply::Accepted { .. } | NodeReply::NoReply(_)))
        };
        self.replies.iter().enumerate().filter(move |(_, reply)| may(reply)).map(|(node, _)| node)
    }

    fn count(&self, is: impl Fn(&NodeReply) -> bool) -> usize {
        self.replies.iter().flatten().filter(|reply| is(reply)).count()
    }

    fn pending(&self) -> usize {
        self.replies.iter().filter(|reply| reply.is_none()).count()
    }

    /// How many nodes have answered a try by their vote, whomever it is for.
    fn voters(&self) -> usize {
        self.count(|reply| {
            !matches!(
                reply,
                NodeReply::NotVoting { .. } | NodeReply::Refused(_) | NodeReply::NoReply(_)
            )
        })
    }

    fn yes(&self) -> usize {
        #[cfg(test)]
        if self.quorum.counts_answers {
            return self.repeated + self.count(|reply| matches!(reply, NodeReply::Accepted { .. }));
        }
        self.count(|reply| matches!(reply, NodeReply::Accepted { .. }))
    }

    fn acquired(&self, now: Moment, tokens: Grant) -> Option<Outcome> {
        let majority = self.quorum.majority;
        let (yes, pending) = (self.yes(), self.pending());
        if yes >= majority {
            return Some(if now < self.valid_until(now) {
                Outcome::Granted(tokens)
            } else {
                Outcome::NoMajority(self.too_late())
            });
        }
        if yes + pending >= majority {
            return None;
        }
        let voters = self.voters();
        if voters + pending < majority {
            return Some(Outcome::NoMajority(self.no_majority(Operation::Acquire)));
        }
        if voters < majority {
            return None; // whether the votes are divided, or too few answer, is not known yet
        }
        Some(self.not_granted(pending))
    }

    /// Whether a try has a rival and a majority has answered it, so that only nodes that
    /// may be stopped could still decide it.
    pub(super) fn is_divided(&self) -> bool {
        matches!(self.ask, NodeRequest::Acquire { .. })
            && !self.decided
            && self.voters() >= self.quorum.majority
            && self.count(|reply| matches!(reply, NodeReply::HeldByOther { .. })) > 0
    }

    /// The nodes that have not answered had their time. A try that is divided is decided
    /// without them: its votes keep everybody else from the lock meanwhile.
    pub(super) fn decide_divided(&mut self) -> Option<Outcome> {
        if !self.is_divided() {
            return None;
        }
        self.decided = true;
        Some(self.not_granted(0))
    }

    /// What came of a try that most nodes have answered, and too few with yes.
    fn not_granted(&self, pending: usize) -> Outcome {
        let (majority, yes) = (self.quorum.majority, self.yes());
        let (holder, held_by, free_in) = self.most_taken();
        let yielded = self.count(|reply| matches!(reply, NodeReply::Yielded { .. }));
        if held_by + yielded >= majority {
            return Outcome::Taken { holder, free_in };
        }
        let other_tokens = self.count(|reply| {
            matches!(reply, NodeReply::TokenTooLow { .. } | NodeReply::TokenTooHigh)
        });
        if yes + pending + other_tokens >= majority {
            Outcome::Again
        } else {
            Outcome::Split { holder }
        }
    }

    /// When a majority of these votes is over for its holder.
    pub(super) fn valid_until(&self, _now: Moment) -> Moment {
        #[cfg(test)]
        if self.quorum.counted_from_reply {
            return _now + (self.ttl - margin(self.ttl));
        }
        self.sent + (self.ttl - margin(self.ttl))
    }

    /// Who has the most votes, how many, and when a majority may be free of them.
    fn most_taken(&self) -> (Option<Arc<Holder>>, usize, Option<Duration>) {
        let taken = || {
            self.replies.iter().flatten().filter_map(|reply| match reply {
                NodeReply::HeldByOther { by, free_in, holder, .. } => Some((*by, *free_in, holder)),
                _ => None,
            })
        };
        let votes = |attempt_id: AttemptId| taken().filter(|(by, ..)| *by == attempt_id).count();
        let Some((most, _, holder)) = taken().max_by_key(|(by, ..)| votes(*by)) else {
            return (None, 0, None);
        };
        // Those who do not answer and those who are free may be counted on.
        let mut ends: Vec<Duration> = taken().map(|(_, free_in, _)| free_in).collect();
        ends.sort_unstable();
        let needed = self.quorum.majority.saturating_sub(self.yes() + self.pending());
        let free_in = needed.checked_sub(1).and_then(|last| ends.get(last)).copied();
        (holder.clone(), votes(most), free_in)
    }

    fn renewed(&self, further: Option<Grant>) -> Option<Outcome> {
        let majority = self.quorum.majority;
        let (yes, pending) = (self.yes(), self.pending());
        let refused = self.count(|reply| {
            matches!(
                reply,
                NodeReply::HeldByOther { .. } | NodeReply::TokenTooLow { .. } | NodeReply::NoLease
            )
        });
        if yes >= majority {
            let extended =
                self.count(|reply| matches!(reply, NodeReply::Accepted { extended: true, .. }));
            if let Some(grant) = further
                && extended >= majority
            {
                return Some(Outcome::Extended(grant));
            }
            let waits =
                self.count(|reply| matches!(reply, NodeReply::Accepted { others_wait: true, .. }));
            return Some(Outcome::Held { others_wait: waits > 0 });
        }
        if refused > self.quorum.nodes - majority {
            return Some(Outcome::Lost);
        }
        (yes + pending < majority).then(|| Outcome::NoMajority(self.no_majority(Operation::Renew)))
    }

    /// A release is decided when a majority has answered it: from then on the key is free
    /// for others, and what the rest may have is given back behind it. Nodes that do not
    /// answer and have voted count as if they had the lease still, so nobody waits for them.
    fn released(&self) -> Option<Outcome> {
        let majority = self.quorum.majority;
        let may_have = |(reply, voted): &(&Option<NodeReply>, &bool)| {
            **voted && matches!(reply, None | Some(NodeReply::NoReply(_) | NodeReply::Refused(_)))
        };
        let others = self.replies.iter().zip(&self.voted).filter(may_have).count();
        let held = self.yes() + others >= majority;
        let answered =
            self.count(|reply| matches!(reply, NodeReply::Accepted { .. } | NodeReply::NoLease));
        if answered >= majority || self.pending() == 0 && !held {
            return Some(Outcome::Released(if held {
                ReleaseOutcome::Released
            } else {
                ReleaseOutcome::AlreadyLost
            }));
        }
        (self.pending() == 0).then(|| Outcome::NoMajority(self.no_majority(Operation::Release)))
    }

    /// A majority voted, but when the ttl was over.
    fn too_late(&self) -> Error {
        Error::new(ErrorKind::Unavailable, Operation::Acquire).with_message(format!(
            "{} of {} nodes must agree; they did, but only after the ttl of {} had passed; use a longer ttl, or find out why the nodes are so slow",
            self.quorum.majority,
            self.quorum.nodes,
            humantime::format_duration(self.ttl)
        ))
    }

    /// Why too few nodes agree.
    fn no_majority(&self, operation: Operation) -> Error {
        let (nodes, majority) = (self.quorum.nodes, self.quorum.majority);
        let mut errors: Vec<&Error> = Vec::new();
        let (mut not_voting, mut longest) = (0, Duration::ZERO);
        for reply in self.replies.iter().flatten() {
            match reply {
                NodeReply::Refused(error) | NodeReply::NoReply(error) => errors.push(error),
                NodeReply::NotVoting { yet } => {
                    not_voting += 1;
                    longest = longest.max(*yet);
                }
                _ => {}
            }
        }
        // What a retry does not change is told first, and decides if it alone is too much.
        errors.sort_by_key(|error| error.kind().is_retryable());
        let fatal = errors.iter().filter(|error| !error.kind().is_retryable()).count();
        let kind = match errors.first() {
            Some(error) if fatal > nodes - majority => error.kind(),
            // What an acquire did is taken back in the background.
            Some(_) if operation == Operation::Acquire => ErrorKind::Unavailable,
            Some(_) if errors.iter().any(|error| error.kind() == ErrorKind::Unknown) => {
                ErrorKind::Unknown
            }
            _ => ErrorKind::Unavailable,
        };
        let mut what = format!("{majority} of {nodes} nodes must agree");
        if let Some(first) = errors.first() {
            what += &format!("; {} refuse or do not answer: {}", errors.len(), first.detail());
        }
        if not_voting > 0 {
            what += &format!(
                "; {not_voting} nodes restarted or lost their data and will vote again in {} s, when the locks that they lost have expired (for new nodes, run `dlock schema` to skip this)",
                longest.as_secs() + 1
            );
        }
        Error::new(kind, operation).with_message(what)
    }
}
