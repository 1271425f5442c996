//! One process for these tests: its machine, and the calls that it makes. The test plays
//! the backend and the clock.

use std::sync::Arc;
use std::time::Duration;

use dlock::backend::{
    AcquireOutcome, Answer, Claim, Grant, Moment, Notice, Owner, RenewOutcome, Request, SessionTerm,
};
use dlock::machine::{
    Action, Actions, CallId, Engine, HandoverLimits, LeaseStatus, Limits, LockRequest, Outcome,
    PlantedBug, QueueScope, Refusal, Ticket, Wait,
};
use dlock::{Error, ErrorKind, Holder, Key, LossReason, Mode, Operation};

pub(crate) fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) fn at(millis: u64) -> Moment {
    Moment::default() + ms(millis)
}

pub(crate) fn holder(client: u64) -> Arc<Holder> {
    let name = format!("client-{client}");
    Arc::new(Holder { client, name, host: "here".into(), pid: 1, tags: Vec::new() })
}

pub(crate) fn unanswered(operation: Operation) -> Error {
    Error::new(ErrorKind::Unknown, operation)
}

pub(crate) struct Process {
    pub(crate) machine: Engine<()>,
    /// The calls that are not answered.
    pub(crate) calls: Vec<(CallId, Request)>,
    /// Why locks were lost.
    pub(crate) lost: Vec<LossReason>,
}

impl Process {
    pub(crate) fn new() -> Self {
        Self::with_bug(PlantedBug::default())
    }

    pub(crate) fn with_bug(planted: PlantedBug) -> Self {
        Self::with(HandoverLimits { count: 2, time: ms(1_000), extend_after: 9 }, planted)
    }

    pub(crate) fn with_handover(handover: HandoverLimits) -> Self {
        Self::with(handover, PlantedBug::default())
    }

    fn with(handover: HandoverLimits, planted: PlantedBug) -> Self {
        let limits = Limits { handover, waiters: 10, attempt: ms(1_000) };
        let machine = Engine::new(limits, [7; 32], planted);
        Process { machine, calls: Vec::new(), lost: Vec::new() }
    }

    /// A process in which one task asks for the exclusive lock; the call is not answered.
    pub(crate) fn acquiring(now: Moment) -> (Self, Ticket, CallId, Arc<Claim>) {
        let mut process = Self::new();
        let ticket = process.enqueue(now);
        let (call, claim) = process.acquire();
        (process, ticket, call, claim)
    }

    pub(crate) fn step<T>(&mut self, step: impl FnOnce(&mut Engine<()>, &mut Actions) -> T) -> T {
        let mut actions = Actions::new();
        let result = step(&mut self.machine, &mut actions);
        for action in actions {
            match action {
                Action::Call(call, request) => self.calls.push((call, request)),
                Action::Lost(_, reason) => self.lost.push(reason),
                _ => {}
            }
        }
        result
    }

    /// A task asks for a key.
    pub(crate) fn request(
        &mut self,
        now: Moment,
        key: &str,
        mode: Mode,
        wait: Wait,
        scope: QueueScope,
    ) -> Result<Ticket, Refusal> {
        let key = Key::new(key).expect("a key");
        let (ttl, holder) = (ms(3_000), holder(1));
        let request = LockRequest { key: &key, mode, ttl, wait, scope, max_hold: None, holder };
        self.step(|machine, actions| machine.enqueue(now, request, (), actions))
    }

    pub(crate) fn enqueue_with(
        &mut self,
        now: Moment,
        mode: Mode,
        wait: Wait,
        scope: QueueScope,
    ) -> Ticket {
        self.request(now, "k", mode, wait, scope).expect("a ticket")
    }

    /// A task asks for the exclusive lock, and waits for it.
    pub(crate) fn enqueue(&mut self, now: Moment) -> Ticket {
        self.enqueue_key(now, "k")
    }

    pub(crate) fn enqueue_key(&mut self, now: Moment, key: &str) -> Ticket {
        let wait = Wait::Until(Moment::NEVER);
        self.request(now, key, Mode::Exclusive, wait, QueueScope::Shared).expect("a ticket")
    }

    /// The only call in flight.
    pub(crate) fn call(&mut self) -> (CallId, Request) {
        assert_eq!(self.calls.len(), 1, "{:?}", self.calls);
        self.calls.remove(0)
    }

    pub(crate) fn acquire(&mut self) -> (CallId, Arc<Claim>) {
        match self.call() {
            (call, Request::Acquire(claim)) => (call, claim),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn renew(&mut self) -> (CallId, Arc<Claim>) {
        match self.call() {
            (call, Request::Renew(lease)) => (call, lease),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn release(&mut self) -> (CallId, Arc<Claim>) {
        match self.call() {
            (call, Request::Release(lease, _)) => (call, lease),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn answer(&mut self, now: Moment, call: CallId, answer: Answer) {
        self.step(|machine, actions| machine.reply(now, call, answer, actions));
    }

    pub(crate) fn granted(&mut self, now: Moment, call: CallId, first: u64, count: u32) {
        let grant = Grant { first, count };
        self.answer(now, call, Answer::Acquire(Ok(AcquireOutcome::Granted(grant))));
    }

    pub(crate) fn session_granted(&mut self, now: Moment, call: CallId, term: SessionTerm) {
        let granted =
            AcquireOutcome::SessionGranted { grant: Grant { first: 64, count: 64 }, term };
        self.answer(now, call, Answer::Acquire(Ok(granted)));
    }

    pub(crate) fn queued(&mut self, now: Moment, call: CallId) {
        let queued = AcquireOutcome::Queued { holder: Some(holder(2)), free_in: None };
        self.answer(now, call, Answer::Acquire(Ok(queued)));
    }

    pub(crate) fn session_queued(&mut self, now: Moment, call: CallId) {
        let queued = AcquireOutcome::SessionQueued { holder: None };
        self.answer(now, call, Answer::Acquire(Ok(queued)));
    }

    pub(crate) fn renewed(&mut self, now: Moment, call: CallId, others_wait: bool) {
        self.answer(now, call, Answer::Renew(Ok(RenewOutcome::Held { others_wait })));
    }

    pub(crate) fn session_renewed(&mut self, now: Moment, call: CallId, term: SessionTerm) {
        let renewed = RenewOutcome::SessionHeld { others_wait: false, term };
        self.answer(now, call, Answer::Renew(Ok(renewed)));
    }

    pub(crate) fn renewal_unanswered(&mut self, now: Moment, call: CallId) {
        self.answer(now, call, Answer::Renew(Err(unanswered(Operation::Renew))));
    }

    pub(crate) fn notice(&mut self, now: Moment, owner: Owner, notice: Notice) {
        self.step(|machine, actions| machine.notice(now, owner, notice, actions));
    }

    /// The lock was handed to a claim that waited: five tokens, counted from `sent`.
    pub(crate) fn handed_over(&mut self, now: Moment, owner: Owner, first: u64, sent: Moment) {
        self.notice(now, owner, Notice::Granted { grant: Grant { first, count: 5 }, sent });
    }

    pub(crate) fn tick(&mut self, now: Moment) {
        self.step(|machine, actions| machine.tick(now, actions));
    }

    /// Steps to the moment at which something is due next, and returns it.
    pub(crate) fn next_due(&mut self) -> Moment {
        let due = self.machine.next_due();
        self.tick(due);
        due
    }

    pub(crate) fn token(&mut self, ticket: Ticket) -> u64 {
        match self.machine.outcome(ticket) {
            Outcome::Admitted { token, .. } => token,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn waits(&mut self, ticket: Ticket) -> bool {
        matches!(self.machine.outcome(ticket), Outcome::Waiting)
    }

    pub(crate) fn is_admitted(&mut self, ticket: Ticket) -> bool {
        matches!(self.machine.outcome(ticket), Outcome::Admitted { .. })
    }

    pub(crate) fn forget(&mut self, now: Moment, ticket: Ticket) {
        self.step(|machine, actions| machine.forget(now, ticket, actions));
    }

    pub(crate) fn is_lost(&self, now: Moment, ticket: Ticket) -> bool {
        matches!(self.machine.status(now, ticket), LeaseStatus::Lost(_))
    }

    pub(crate) fn held_until(&self, now: Moment, ticket: Ticket) -> Moment {
        match self.machine.status(now, ticket) {
            LeaseStatus::Held { until, .. } => until,
            LeaseStatus::Lost(reason) => panic!("{reason}"),
        }
    }
}
