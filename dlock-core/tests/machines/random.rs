//! Random steps on one machine and one server, with nested locks: the machine never
//! panics, an exclusive holder is alone, and nothing is left at the end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use dlock::backend::memory::lock_table::{LockTable, SentNotice};
use dlock::backend::{Answer, Break, BreakTarget, Request};
use dlock::backend::{Moment, Notice, Release};
use dlock::machine::{
    Action, Actions, CallId, Engine, LeaseStatus, Limits, LockRequest, Outcome, QueueScope, Ticket,
    Wait,
};
use dlock::machine::{HandoverLimits, PlantedBug};
use dlock::{Holder, Key, Mode, Operation};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use super::process::{holder, unanswered};

struct RandomRun {
    random: StdRng,
    now: Moment,
    machine: Engine<()>,
    queue: LockTable,
    calls: VecDeque<(CallId, Request)>,
    /// Each ticket with its mode and the ticket that it is nested in.
    tickets: Vec<(Ticket, Mode, Option<Ticket>)>,
    holder: Arc<Holder>,
}

impl RandomRun {
    fn new(seed: u64) -> Self {
        let handover =
            HandoverLimits { count: 3, time: Duration::from_millis(50), extend_after: 2 };
        let limits = Limits { handover, waiters: 6, attempt: Duration::from_secs(1) };
        RandomRun {
            random: StdRng::seed_from_u64(seed),
            now: Moment::default() + Duration::from_secs(1),
            machine: Engine::new(limits, [3; 32], PlantedBug::default()),
            queue: LockTable::new(1_000_000, PlantedBug::default()),
            calls: VecDeque::new(),
            tickets: Vec::new(),
            holder: holder(1),
        }
    }

    fn step<T>(&mut self, step: impl FnOnce(&mut Engine<()>, Moment, &mut Actions) -> T) -> T {
        let mut actions = Actions::new();
        let result = step(&mut self.machine, self.now, &mut actions);
        for action in actions {
            if let Action::Call(call, request) = action {
                self.calls.push_back((call, request));
            }
        }
        result
    }

    /// Applies the oldest call, and answers it or loses the answer.
    fn serve(&mut self, answers: bool) {
        let Some((call, request)) = self.calls.pop_front() else { return };
        let mut sent = Vec::new();
        let answer = match request {
            Request::Acquire(claim) => {
                let attempt = self.queue.acquire(self.now, &claim, &mut sent);
                Answer::Acquire(if answers {
                    Ok(attempt)
                } else {
                    Err(unanswered(Operation::Acquire))
                })
            }
            Request::Renew(claim) => {
                let renewed = self.queue.renew(self.now, &claim, &mut sent);
                Answer::Renew(if answers { Ok(renewed) } else { Err(unanswered(Operation::Renew)) })
            }
            Request::Release(claim, how) => {
                let released = self.queue.release(self.now, &claim, how, &mut sent);
                Answer::Release(if answers {
                    Ok(released)
                } else {
                    Err(unanswered(Operation::Release))
                })
            }
        };
        self.step(|machine, now, actions| machine.reply(now, call, answer, actions));
        self.tell(sent);
    }

    fn tell(&mut self, sent: Vec<SentNotice>) {
        for SentNotice { owner, notice, .. } in sent {
            // Who broke a lock is told to; other messages may be lost.
            if matches!(notice, Notice::Lost(_)) || self.random.random_ratio(9, 10) {
                self.step(|machine, now, actions| machine.notice(now, owner, notice, actions));
            }
        }
    }

    fn held(&mut self) -> Vec<(Ticket, Mode, Option<Ticket>)> {
        let now = self.now;
        let mut held = self.tickets.clone();
        held.retain(|(ticket, ..)| {
            matches!(self.machine.outcome(*ticket), Outcome::Admitted { .. })
                && matches!(self.machine.status(now, *ticket), LeaseStatus::Held { .. })
        });
        held
    }

    fn enqueue(&mut self) {
        let mode = match self.random.random_range(0..5) {
            0 => Mode::Shared,
            1 => Mode::Permits { count: 1, of: 2 },
            _ => Mode::Exclusive,
        };
        let wait = match self.random.random_range(0..3) {
            0 => Wait::Try,
            1 => Wait::For(Duration::from_millis(self.random.random_range(1..200))),
            _ => Wait::Until(Moment::NEVER),
        };
        let held = self.held();
        let outer = held.choose(&mut self.random).filter(|(_, mode, _)| *mode == Mode::Exclusive);
        let outer = outer.map(|(ticket, ..)| *ticket).filter(|_| !mode.is_permits());
        let nested = outer.filter(|_| self.random.random_ratio(1, 2));
        let scope = match nested {
            Some(outer) => QueueScope::Nested(outer),
            None if mode.is_permits() || self.random.random_ratio(1, 4) => QueueScope::Separate,
            None => QueueScope::Shared,
        };
        let key = Key::new("k").expect("a key");
        let ask = LockRequest {
            key: &key,
            mode,
            ttl: Duration::from_millis(300),
            wait,
            scope,
            max_hold: self.random.random_ratio(1, 6).then(|| Duration::from_millis(40)),
            holder: self.holder.clone(),
        };
        if let Ok(ticket) =
            self.step(|machine, now, actions| machine.enqueue(now, ask, (), actions))
        {
            self.tickets.push((ticket, mode, nested));
        }
    }

    /// Drops a ticket, after those that are nested in it, as nested code does.
    fn let_go(&mut self, place: usize) {
        let (ticket, ..) = self.tickets[place];
        if self.random.random_ratio(4, 5) {
            while let Some(inner) =
                self.tickets.iter().position(|(_, _, outer)| *outer == Some(ticket))
            {
                self.let_go(inner);
            }
        }
        self.tickets.retain(|(other, ..)| *other != ticket);
        let admitted = matches!(self.machine.outcome(ticket), Outcome::Admitted { .. });
        if admitted && self.random.random_ratio(1, 3) {
            let after = self.random.random_ratio(1, 5);
            let how = if after { Release::After(Duration::from_millis(30)) } else { Release::Now };
            self.step(|machine, now, actions| machine.release(now, ticket, how, actions));
        }
        self.step(|machine, now, actions| machine.forget(now, ticket, actions));
    }

    fn check(&mut self, seed: u64) {
        let outermost: Vec<Mode> = self
            .held()
            .into_iter()
            .filter(|(_, mode, outer)| outer.is_none() && !mode.is_permits())
            .map(|(_, mode, _)| mode)
            .collect();
        let exclusive = outermost.contains(&Mode::Exclusive);
        assert!(!exclusive || outermost.len() == 1, "seed {seed}: {outermost:?}");
    }

    fn play(mut self, seed: u64) {
        for _ in 0..300 {
            match self.random.random_range(0..12) {
                0..3 => self.enqueue(),
                3..5 if !self.tickets.is_empty() => {
                    let place = self.random.random_range(0..self.tickets.len());
                    self.let_go(place);
                }
                5 => {
                    // Nested ones keep a guard from being downgraded; others go on as readers.
                    let held = self.held();
                    if let Some(&(ticket, Mode::Exclusive, None)) = held.choose(&mut self.random) {
                        let token = self
                            .step(|machine, now, actions| machine.downgrade(now, ticket, actions));
                        if token.is_some() {
                            let kept = self.tickets.iter_mut().find(|(kept, ..)| *kept == ticket);
                            kept.expect("a ticket").1 = Mode::Shared;
                        }
                    }
                }
                6 if self.random.random_ratio(1, 10) => {
                    let (key, by) = (Key::new("k").expect("a key"), self.holder.clone());
                    let mut sent = Vec::new();
                    let how = Break { by, target: BreakTarget::Lock, delay: Duration::ZERO };
                    self.queue.break_lock(self.now, &key, &how, &mut sent);
                    self.tell(sent);
                }
                7 => {
                    self.now = self.now + Duration::from_millis(self.random.random_range(1..60));
                    self.step(Engine::tick);
                }
                _ => {
                    let answers = self.random.random_ratio(19, 20);
                    self.serve(answers);
                }
            }
            self.check(seed);
        }
        while !self.tickets.is_empty() {
            self.let_go(0);
        }
        for _ in 0..2_000 {
            self.now = self.now + Duration::from_millis(5);
            self.step(Engine::tick);
            while !self.calls.is_empty() {
                self.serve(true);
            }
        }
        assert!(self.machine.is_idle(), "seed {seed}: {:?}", self.machine);
        assert_eq!(self.queue.in_use(self.now), 0, "seed {seed}");
    }
}

#[test]
fn random_steps() {
    for seed in 0..3_000 {
        RandomRun::new(seed).play(seed);
    }
}
