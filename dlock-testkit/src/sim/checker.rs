//! The history checker.

use std::time::Duration;

use dlock::{Access, Fence, Mode, Token};

use super::world::Seat;

/// Judges a history by the invariants of the project:
///
/// - **I1** Two holders of a key that exclude each other never overlap while both
///   are held by their own deadline. Tokens rise: an exclusive holder's is above
///   all before it, a shared one's above those of the exclusive ones. A fenced
///   resource accepts the writes of a holder whose lock is held, and never one
///   of a holder that was overtaken by an accepted write.
/// - **I3** At rest nothing is left: no ticket, gate, claim or owed release in a
///   process, and nothing of a living process at a server.
/// - **I4** Recovery is bounded: once faults are over, nobody waits long for a
///   lock that is free, nor longer than those before him take; and a lock is not
///   lost unless something kept it from being renewed, nor handed over with less
///   than half its term left.
///
/// What a server that lost its data cannot know is excused until the leases from
/// before have ended; tokens must rise even then.
#[derive(Debug, Default)]
pub struct Checker {
    keys: Vec<KeyHistory>,
    pub(super) violation: Option<String>,
}

#[derive(Debug, Default)]
struct KeyHistory {
    holds: Vec<Hold>,
    fence: Fence,
    order: u64,
    /// The order of the latest holder, by access, whose write was accepted.
    last_write: u64,
    top_exclusive: u64,
    top_any: u64,
    /// When the server last lost its data.
    forgot: Option<Loss>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Loss {
    pub(super) at: Duration,
    /// Leases from before have tokens between these.
    pub(super) tokens: (u64, u64),
}

impl Loss {
    /// Whether a lease with this token is one that the server forgot.
    fn hit(&self, token: u64) -> bool {
        (self.tokens.0..self.tokens.1).contains(&token)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Hold {
    pub(super) seat: Seat,
    pub(super) mode: Mode,
    pub(super) token: u64,
    order: u64,
}

impl Checker {
    pub(super) fn new(keys: usize) -> Self {
        Checker { keys: (0..keys).map(|_| KeyHistory::default()).collect(), violation: None }
    }

    pub(super) fn violated(&mut self, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    /// A task was let in.
    pub(super) fn admitted(
        &mut self,
        key: usize,
        seat: Seat,
        mode: Mode,
        token: u64,
        now: Duration,
        longest_lease: Duration,
    ) {
        let history = &mut self.keys[key];
        history.order += 1;
        let excused = history.is_excused(now, longest_lease)
            && history.forgot.is_some_and(|forgot| forgot.hit(token));
        let rises = match mode {
            Mode::Exclusive => token > history.top_any,
            Mode::Shared => token > history.top_exclusive,
            _ => true,
        };
        let top = history.top_any;
        match mode {
            Mode::Exclusive => {
                history.top_exclusive = history.top_exclusive.max(token);
                history.top_any = history.top_any.max(token);
            }
            Mode::Shared => history.top_any = history.top_any.max(token),
            _ => {}
        }
        let order = history.order;
        history.holds.push(Hold { seat, mode, token, order });
        if !rises && !excused {
            self.violated(|| {
                format!("I1: token {token} of {seat:?} on key {key} ({mode:?}) does not rise above {top}")
            });
        }
    }

    /// A task let go, or its process died.
    pub(super) fn left(&mut self, key: usize, seat: Seat) {
        self.keys[key].holds.retain(|hold| hold.seat != seat);
    }

    pub(super) fn left_all(&mut self, gone: impl Fn(Seat) -> bool) {
        for history in &mut self.keys {
            history.holds.retain(|hold| !gone(hold.seat));
        }
    }

    /// A holder goes on as a reader.
    pub(super) fn downgraded(&mut self, key: usize, seat: Seat, token: u64) {
        let history = &mut self.keys[key];
        if let Some(hold) = history.holds.iter_mut().find(|hold| hold.seat == seat) {
            hold.mode = Mode::Shared;
            hold.token = hold.token.max(token);
        }
        history.top_any = history.top_any.max(token);
    }

    pub(super) fn forgot(&mut self, key: usize, loss: Loss) {
        self.keys[key].forgot = Some(loss);
    }

    /// A holder writes to the resource with its token.
    pub(super) fn write(
        &mut self,
        key: usize,
        seat: Seat,
        held: bool,
        unfenced: bool,
        now: Duration,
        longest_lease: Duration,
    ) {
        let history = &mut self.keys[key];
        let Some(hold) = history.holds.iter().find(|hold| hold.seat == seat).cloned() else {
            return;
        };
        let access = match hold.mode {
            Mode::Exclusive => Access::Exclusive,
            Mode::Shared => Access::Shared,
            _ => return,
        };
        let Some(token) = Token::new(hold.token) else {
            return self.violated(|| format!("I1: token {} is 2^53 or above", hold.token));
        };
        let accepted = history.fence.pass(access, token) || unfenced;
        let excused = history.is_excused(now, longest_lease);
        let overtaken = access == Access::Exclusive && hold.order < history.last_write;
        if accepted && access == Access::Exclusive {
            history.last_write = history.last_write.max(hold.order);
        }
        if accepted && overtaken && !excused {
            self.violated(|| format!("I1: a stale write of {seat:?} on key {key} was accepted"));
        } else if !accepted && held && !excused {
            self.violated(|| {
                format!(
                    "I1: the write of {seat:?}, who holds key {key}, was rejected: token {token}"
                )
            });
        }
    }

    /// Judges who holds a key at this moment; `held` says by the holder's own
    /// machine and clock.
    pub(super) fn overlap(&mut self, key: usize, held: impl Fn(Seat) -> bool) {
        let history = &self.keys[key];
        if history.holds.len() < 2 {
            return;
        }
        let now: Vec<&Hold> = history.holds.iter().filter(|hold| held(hold.seat)).collect();
        let excuses = |one: &Hold, two: &Hold| {
            history.forgot.is_some_and(|forgot| forgot.hit(one.token) || forgot.hit(two.token))
        };
        let mut taken = 0;
        let mut capacity = u32::MAX;
        for (n, one) in now.iter().enumerate() {
            if let Mode::Permits { count, of } = one.mode {
                taken += count;
                capacity = capacity.min(of);
                continue;
            }
            for two in &now[n + 1..] {
                let exclude = matches!(
                    (one.mode, two.mode),
                    (Mode::Exclusive, Mode::Exclusive | Mode::Shared)
                        | (Mode::Shared, Mode::Exclusive)
                );
                if exclude && !excuses(one, two) {
                    let (one, two) = ((*one).clone(), (*two).clone());
                    self.violated(|| format!("I1: key {key} is held twice: {one:?} and {two:?}"));
                    return;
                }
            }
        }
        if taken > capacity && history.forgot.is_none() {
            self.violated(|| format!("I1: {taken} permits of {capacity} are taken on key {key}"));
        }
    }
}

impl KeyHistory {
    fn is_excused(&self, now: Duration, longest_lease: Duration) -> bool {
        self.forgot.is_some_and(|forgot| now < forgot.at + longest_lease)
    }
}
