//! Pure: a node of a quorum and one key at it, as a model of the scripts
//! `lua/redlock_node.lua` and `lua/redlock_calls.lua`. Waiting is not modelled: it changes
//! no vote.

use std::time::Duration;

use super::quorum::{AttemptId, LEAD, NodeReply, NodeRequest, SLACK};
use crate::claim::Grant;

/// Bugs of a node that the simulation must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeBug {
    /// A node that has lost its data votes at once.
    VotesAfterRestart,
    /// A node that has lost its data takes a lease again that is renewed.
    RestoresAfterRestart,
    /// The register is not stored, so a missing one is all there ever is.
    ForgetsRegister,
    /// What takes back one try takes back the later ones too.
    UndoIgnoresTheTry,
}

/// A node, with one key. All times are microseconds of its own clock.
#[derive(Clone, Debug)]
pub(super) struct Node {
    /// Since when it can be trusted to remember.
    since: u64,
    silence: u64,
    register: u64,
    lease: Option<Lease>,
    bug: Option<NodeBug>,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    attempt_id: AttemptId,
    ends: u64,
}

impl Node {
    /// A node that votes from `since` plus the silence on.
    pub(super) fn new(since: u64, silence: Duration, bug: Option<NodeBug>) -> Self {
        let silence = u64::try_from(silence.as_micros()).unwrap_or(u64::MAX);
        Node { since, silence, register: 0, lease: None, bug }
    }

    /// It has lost its data, or it was started again and may have lost some: what it has is
    /// then that of an earlier moment.
    pub(super) fn loses_data(&mut self, now: u64, kept: Option<&Node>) {
        let (register, lease) = kept.map_or((0, None), |kept| (kept.register, kept.lease));
        (self.register, self.lease, self.since) = (register, lease, now);
    }

    fn register(&self, now: u64) -> u64 {
        self.register.max(now - SLACK)
    }

    fn held(&self, now: u64) -> Option<Lease> {
        self.lease.filter(|lease| lease.ends > now)
    }

    pub(super) fn holder(&self, now: u64) -> Option<AttemptId> {
        self.held(now).map(|lease| lease.attempt_id)
    }

    /// Whether its lease ends at about this time.
    pub(super) fn ends_about(&self, now: u64) -> bool {
        self.lease.is_some_and(|lease| lease.ends.abs_diff(now) < 3_000)
    }

    pub(super) fn ask(&mut self, now: u64, ask: &NodeRequest, ttl: u64) -> NodeReply {
        match *ask {
            NodeRequest::Acquire { attempt_id, tokens, instead_of } => {
                if let Some(lease) = self.held(now) {
                    if lease.attempt_id == attempt_id {
                        return NodeReply::Accepted { others_wait: false, extended: false };
                    }
                    let own = lease.attempt_id.owner == attempt_id.owner
                        && lease.attempt_id.attempt <= attempt_id.attempt;
                    if !own && Some(lease.attempt_id.owner) != instead_of {
                        return self.taken(now, lease);
                    }
                    self.lease = None;
                }
                if let Some(yet) = self.silent_for(now) {
                    return NodeReply::NotVoting { yet };
                }
                if let Some(refused) = self.refuses(now, tokens) {
                    return refused;
                }
                self.store(last_of(tokens));
                self.lease = Some(Lease { attempt_id, ends: now + ttl });
                NodeReply::Accepted { others_wait: false, extended: false }
            }
            NodeRequest::Renew { attempt_id, tokens, further, restore } => {
                match self.held(now) {
                    Some(lease) if lease.attempt_id != attempt_id => return self.taken(now, lease),
                    None if !restore => return NodeReply::NoLease,
                    None if self.register > last_of(tokens) => {
                        return NodeReply::TokenTooLow { next: self.register(now) + 1 };
                    }
                    // It may have forgotten a vote for somebody else.
                    None if self.bug != Some(NodeBug::RestoresAfterRestart) => {
                        if let Some(yet) = self.silent_for(now) {
                            return NodeReply::NotVoting { yet };
                        }
                    }
                    _ => {}
                }
                let further = further.filter(|further| self.refuses(now, *further).is_none());
                self.store(self.register.max(last_of(further.unwrap_or(tokens))));
                self.lease = Some(Lease { attempt_id, ends: now + ttl });
                NodeReply::Accepted { others_wait: false, extended: further.is_some() }
            }
            NodeRequest::Undo { attempt_id } | NodeRequest::Release { attempt_id } => {
                let is_it = |lease: &Lease| {
                    let later = lease.attempt_id.attempt > attempt_id.attempt;
                    lease.attempt_id.owner == attempt_id.owner
                        && (!later || self.bug == Some(NodeBug::UndoIgnoresTheTry))
                };
                match self.held(now).filter(is_it) {
                    Some(_) => {
                        self.lease = None;
                        NodeReply::Accepted { others_wait: false, extended: false }
                    }
                    None => NodeReply::NoLease,
                }
            }
        }
    }

    /// How long it does not vote yet.
    fn silent_for(&self, now: u64) -> Option<Duration> {
        let left = (self.since + self.silence).saturating_sub(now);
        let silent = left > 0 && self.bug != Some(NodeBug::VotesAfterRestart);
        silent.then(|| Duration::from_micros(left))
    }

    fn store(&mut self, register: u64) {
        if self.bug != Some(NodeBug::ForgetsRegister) {
            self.register = register;
        }
    }

    fn refuses(&self, now: u64, tokens: Grant) -> Option<NodeReply> {
        if tokens.first <= self.register(now) {
            return Some(NodeReply::TokenTooLow { next: self.register(now) + 1 });
        }
        (last_of(tokens) > now + LEAD).then_some(NodeReply::TokenTooHigh)
    }

    fn taken(&self, now: u64, lease: Lease) -> NodeReply {
        NodeReply::HeldByOther {
            by: lease.attempt_id,
            next: self.register(now) + 1,
            free_in: Duration::from_micros(lease.ends - now),
            holder: None,
        }
    }
}

/// The last token of a grant.
fn last_of(tokens: Grant) -> u64 {
    tokens.first + u64::from(tokens.count) - 1
}
