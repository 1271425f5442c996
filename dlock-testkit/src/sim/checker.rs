//! The checker of a simulated history.

use std::time::Duration;

use dlock::{Access, Fence, Mode, Token};

use super::simulation::TaskRun;

/// Checks a history against the invariants of the project:
///
/// - **I1** Two holders of a key that exclude each other never overlap while both
///   are held by their own deadline. Tokens rise: the token of an exclusive holder
///   is above all before it, the token of a shared holder is above those of all
///   exclusive holders before it. A fenced resource accepts the writes of a holder
///   whose lock is held, and rejects a stale one after a later holder has written.
/// - **I3** At rest nothing is left: no ticket, gate, claim or unsent release in a
///   process, and nothing of a living process at a server.
/// - **I4** Recovery is bounded. Once faults are over, nobody waits long for a lock
///   that is free, nor longer than the waiters before it take. A lock is not lost
///   unless something kept it from being renewed, and it is not handed over with
///   less than half of its ttl left.
/// - **Rule 15** Who asks inside a lock that it holds gets its token; two who ask inside
///   the same lock exclude each other as others do.
/// - **Rule 16** A process that shuts down admits nobody any more, and when its grace is
///   over nobody holds a lock.
/// - **Row 28** Every holder of a broken lock knows it before the delay of the break is
///   over, and so before somebody else is let in, unless messages were lost or late.
///
/// A server that lost its data cannot know the leases from before: violations are
/// excused until these have ended, but tokens must rise even then.
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
    /// The order of the latest exclusive holder whose write was accepted.
    last_write: u64,
    top_exclusive: u64,
    top_any: u64,
    /// When the server last lost its data.
    data_loss: Option<DataLoss>,
    /// Until then holders of a broken lock may not have heard of it.
    broken_until: Duration,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct DataLoss {
    pub(super) at: Duration,
    /// The range of the tokens of leases from before.
    pub(super) tokens: (u64, u64),
}

impl DataLoss {
    /// Whether the server has lost the lease with this token.
    fn hit(&self, token: u64) -> bool {
        (self.tokens.0..self.tokens.1).contains(&token)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Hold {
    pub(super) run: TaskRun,
    pub(super) mode: Mode,
    pub(super) token: u64,
    order: u64,
    /// The holder inside whose lock it asked, with the same token.
    parent: Option<TaskRun>,
}

impl Hold {
    fn is_inside(&self, other: &Hold) -> bool {
        self.parent == Some(other.run)
    }
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

    /// Records that a task was given the lock.
    pub(super) fn admitted(
        &mut self,
        key: usize,
        run: TaskRun,
        mode: Mode,
        token: u64,
        now: Duration,
        longest_lease: Duration,
    ) {
        let history = &mut self.keys[key];
        history.order += 1;
        let excused = (history.is_excused(now, longest_lease)
            && history.data_loss.is_some_and(|data_loss| data_loss.hit(token)))
            || now < history.broken_until;
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
        history.holds.push(Hold { run, mode, token, order, parent: None });
        if !rises && !excused {
            self.violated(|| {
                format!(
                    "I1: token {token} of {run:?} on key {key} ({mode:?}) does not rise above {top}"
                )
            });
        }
    }

    /// Records that a task was given the lock inside the lock of another one.
    pub(super) fn admitted_inside(
        &mut self,
        key: usize,
        run: TaskRun,
        parent: TaskRun,
        mode: Mode,
        token: u64,
    ) {
        let history = &mut self.keys[key];
        let outer = history.holds.iter().find(|hold| hold.run == parent);
        let order = outer.map_or(history.order, |outer| outer.order);
        let other = outer.filter(|outer| outer.token != token).map(|outer| outer.token);
        history.holds.push(Hold { run, mode, token, order, parent: Some(parent) });
        if let Some(other) = other {
            self.violated(|| format!("I1: {run:?} has token {token} inside a lock with {other}"));
        }
    }

    /// Records that a lock was broken while something may keep its holders from hearing
    /// of it until then.
    pub(super) fn broken_unheard(&mut self, key: usize, until: Duration) {
        self.keys[key].broken_until = until;
    }

    /// Whether holders of this key may lose it without a word, since the server lost its
    /// data or they could not hear of a break.
    pub(super) fn is_excused(&self, key: usize, now: Duration, longest_lease: Duration) -> bool {
        self.keys[key].is_excused(now, longest_lease) || now < self.keys[key].broken_until
    }

    /// The holders of a key.
    pub(super) fn holders(&self, key: usize) -> impl Iterator<Item = TaskRun> {
        self.keys[key].holds.iter().map(|hold| hold.run)
    }

    /// Records that a task released the lock or dropped its ticket.
    pub(super) fn removed(&mut self, key: usize, run: TaskRun) {
        self.keys[key].holds.retain(|hold| hold.run != run);
    }

    pub(super) fn remove_all(&mut self, gone: impl Fn(TaskRun) -> bool) {
        for history in &mut self.keys {
            history.holds.retain(|hold| !gone(hold.run));
        }
    }

    /// Records that an exclusive holder became a shared one.
    pub(super) fn downgraded(&mut self, key: usize, run: TaskRun, token: u64) {
        let history = &mut self.keys[key];
        if let Some(hold) = history.holds.iter_mut().find(|hold| hold.run == run) {
            hold.mode = Mode::Shared;
            hold.token = hold.token.max(token);
        }
        history.top_any = history.top_any.max(token);
    }

    pub(super) fn data_loss(&mut self, key: usize, loss: DataLoss) {
        self.keys[key].data_loss = Some(loss);
    }

    /// Records that a holder writes to the fenced resource with its token.
    pub(super) fn write(
        &mut self,
        key: usize,
        run: TaskRun,
        held: bool,
        unfenced: bool,
        now: Duration,
        longest_lease: Duration,
    ) {
        let history = &mut self.keys[key];
        let Some(hold) = history.holds.iter().find(|hold| hold.run == run).cloned() else {
            return;
        };
        if hold.parent.is_some() {
            return; // its writes are those of the outer lock
        }
        let access = match hold.mode {
            Mode::Exclusive => Access::Exclusive,
            Mode::Shared => Access::Shared,
            _ => return,
        };
        let Some(token) = Token::new(hold.token) else {
            return self.violated(|| format!("I1: token {} is 2^53 or above", hold.token));
        };
        let accepted = history.fence.pass(access, token) || unfenced;
        let excused = history.is_excused(now, longest_lease) || now < history.broken_until;
        let overtaken = access == Access::Exclusive && hold.order < history.last_write;
        if accepted && access == Access::Exclusive {
            history.last_write = history.last_write.max(hold.order);
        }
        if accepted && overtaken && !excused {
            self.violated(|| format!("I1: a stale write of {run:?} on key {key} was accepted"));
        } else if !accepted && held && !excused {
            self.violated(|| {
                format!(
                    "I1: the write of {run:?}, who holds key {key}, was rejected: token {token}"
                )
            });
        }
    }

    /// Checks the holders of a key at this moment. `held` says whether a holder still
    /// holds the lock by its own machine and clock.
    pub(super) fn overlap(&mut self, key: usize, now: Duration, held: impl Fn(TaskRun) -> bool) {
        let history = &self.keys[key];
        if history.holds.len() < 2 || now < history.broken_until {
            return;
        }
        let now: Vec<&Hold> = history.holds.iter().filter(|hold| held(hold.run)).collect();
        let excuses = |one: &Hold, two: &Hold| {
            history
                .data_loss
                .is_some_and(|data_loss| data_loss.hit(one.token) || data_loss.hit(two.token))
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
                let nested = one.is_inside(two) || two.is_inside(one);
                if exclude && !nested && !excuses(one, two) {
                    let (one, two) = ((*one).clone(), (*two).clone());
                    self.violated(|| format!("I1: key {key} is held twice: {one:?} and {two:?}"));
                    return;
                }
            }
        }
        if taken > capacity && history.data_loss.is_none() {
            self.violated(|| format!("I1: {taken} permits of {capacity} are taken on key {key}"));
        }
    }
}

impl KeyHistory {
    fn is_excused(&self, now: Duration, longest_lease: Duration) -> bool {
        self.data_loss.is_some_and(|data_loss| now < data_loss.at + longest_lease)
    }
}
