//! Tests of the state machines step by step: what goes in and what comes out, one rule
//! at a time.

use std::sync::Arc;
use std::time::Duration;

use dlock::backend::memory::lock_table::{LockTable, SentNotice};
use dlock::backend::{AcquireOutcome, Claim, Grant, Moment, Notice, Owner, Release, RenewOutcome};
use dlock::backend::{Answer, Request};
use dlock::machine::{
    Action, Actions, CallId, Engine, Lane, LeaseStatus, Limits, LockRequest, Outcome, Refusal,
    Ticket, Wait,
};
use dlock::machine::{HandoverLimits, PlantedBug};
use dlock::{Error, ErrorKind, Holder, Key, LossReason, Mode, Operation, ReleaseOutcome};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn at(millis: u64) -> Moment {
    Moment::default() + ms(millis)
}

fn holder(client: u64) -> Arc<Holder> {
    let name = format!("client-{client}");
    Arc::new(Holder { client, name, host: "here".into(), pid: 1, tags: Vec::new() })
}

/// A machine, and the actions of its last step.
struct Process {
    machine: Engine<()>,
    calls: Vec<(CallId, Request)>,
    woken: Vec<Ticket>,
    lost: Vec<LossReason>,
}

impl Process {
    fn new() -> Self {
        let handover = HandoverLimits { count: 2, time: ms(1_000) };
        let limits = Limits { handover, waiters: 10, attempt: ms(1_000) };
        let machine = Engine::new(limits, [7; 32], PlantedBug::default());
        Process { machine, calls: Vec::new(), woken: Vec::new(), lost: Vec::new() }
    }

    fn step<T>(&mut self, step: impl FnOnce(&mut Engine<()>, &mut Actions) -> T) -> T {
        let mut actions = Actions::new();
        let result = step(&mut self.machine, &mut actions);
        self.woken.clear();
        for action in actions {
            match action {
                Action::Call(call, request) => self.calls.push((call, request)),
                Action::Wake(ticket) => self.woken.push(ticket),
                Action::Lost(_, reason) => self.lost.push(reason),
                _ => {}
            }
        }
        result
    }

    fn enqueue_with(&mut self, now: Moment, mode: Mode, wait: Wait, lane: Lane) -> Ticket {
        let key = Key::new("k").expect("a key");
        let ask = LockRequest {
            key: &key,
            mode,
            ttl: ms(3_000),
            wait,
            lane,
            max_hold: None,
            holder: holder(1),
        };
        self.step(|machine, actions| machine.enqueue(now, ask, (), actions)).expect("a ticket")
    }

    fn enqueue(&mut self, now: Moment) -> Ticket {
        self.enqueue_with(now, Mode::Exclusive, Wait::Until(Moment::NEVER), Lane::Shared)
    }

    /// The only call in flight.
    fn call(&mut self) -> (CallId, Request) {
        assert_eq!(self.calls.len(), 1, "{:?}", self.calls);
        self.calls.remove(0)
    }

    fn acquire(&mut self) -> (CallId, Arc<Claim>) {
        match self.call() {
            (call, Request::Acquire(claim)) => (call, claim),
            other => panic!("{other:?}"),
        }
    }

    fn answer(&mut self, now: Moment, call: CallId, answer: Answer) {
        self.step(|machine, actions| machine.reply(now, call, answer, actions));
    }

    fn granted(&mut self, now: Moment, call: CallId, first: u64, count: u32) {
        let grant = Grant { first, count };
        self.answer(now, call, Answer::Acquire(Ok(AcquireOutcome::Granted(grant))));
    }

    fn queued(&mut self, now: Moment, call: CallId) {
        let queued = AcquireOutcome::Queued { holder: Some(holder(2)), free_in: None };
        self.answer(now, call, Answer::Acquire(Ok(queued)));
    }

    fn tick(&mut self, now: Moment) {
        self.step(|machine, actions| machine.tick(now, actions));
    }

    fn token(&mut self, ticket: Ticket) -> u64 {
        match self.machine.outcome(ticket) {
            Outcome::Admitted { token, .. } => token,
            other => panic!("{other:?}"),
        }
    }

    fn waits(&mut self, ticket: Ticket) -> bool {
        matches!(self.machine.outcome(ticket), Outcome::Waiting)
    }

    fn forget(&mut self, now: Moment, ticket: Ticket) {
        self.step(|machine, actions| machine.forget(now, ticket, actions));
    }

    fn held_until(&self, now: Moment, ticket: Ticket) -> Moment {
        match self.machine.status(now, ticket) {
            LeaseStatus::Held { until, .. } => until,
            LeaseStatus::Lost(reason) => panic!("{reason}"),
        }
    }
}

fn unanswered(operation: Operation) -> Error {
    Error::new(ErrorKind::Unknown, operation)
}

/// Rule 3: a lease counts from before its request was sent, minus the margin, however
/// long the answer took.
#[test]
fn a_deadline_counts_from_the_sending() {
    let mut process = Process::new();
    let ticket = process.enqueue(at(1_000));
    let (call, _) = process.acquire();
    process.granted(at(1_900), call, 10, 5);
    assert_eq!(process.token(ticket), 10);
    assert_eq!(process.held_until(at(1_900), ticket), at(1_000 + 3_000 - 60));
    // A third later it is renewed, counted from that sending.
    process.tick(at(2_000));
    let (call, request) = process.call();
    assert!(matches!(request, Request::Renew(_)));
    process.answer(at(2_800), call, Answer::Renew(Ok(RenewOutcome::Held { others_wait: false })));
    assert_eq!(process.held_until(at(2_800), ticket), at(2_000 + 3_000 - 60));
}

/// A grant that arrives after its ttl is not used.
#[test]
fn a_late_grant_is_asked_for_again() {
    let mut process = Process::new();
    let ticket = process.enqueue(at(0));
    let (call, first) = process.acquire();
    process.granted(at(2_950), call, 10, 5);
    assert!(process.waits(ticket));
    assert!(process.calls.is_empty(), "not at once: the ttl may be shorter than the way");
    process.tick(at(3_060));
    let (_, again) = process.acquire();
    assert_eq!(first.owner, again.owner, "the same claim, so the same grant");
}

/// Rule 3, row 22: a hand-over counts from the request that its notice names.
#[test]
fn a_stalled_handover_is_not_believed() {
    let mut process = Process::new();
    let ticket = process.enqueue(at(0));
    let (call, claim) = process.acquire();
    process.queued(at(1), call);
    let grant = Grant { first: 50, count: 5 };
    let stale = Notice::Granted { grant, sent: claim.sent };
    process.step(|machine, actions| machine.notice(at(2_950), claim.owner, stale, actions));
    assert!(process.waits(ticket), "its three seconds were over");
    let (call, _) = process.acquire();
    process.queued(at(2_960), call);
    let fresh = Notice::Granted { grant, sent: at(2_950) };
    process.step(|machine, actions| machine.notice(at(3_000), claim.owner, fresh, actions));
    assert_eq!(process.token(ticket), 50);
    assert_eq!(process.held_until(at(3_000), ticket), at(2_950 + 3_000 - 60));
    assert!(matches!(process.call().1, Request::Renew(_)), "and confirmed at once");
}

/// Rule 6, row 21: no release while the acquire is unanswered.
#[test]
fn a_release_does_not_overtake_its_acquire() {
    let mut process = Process::new();
    let ticket = process.enqueue(at(0));
    let (call, claim) = process.acquire();
    process.forget(at(5), ticket);
    assert!(process.calls.is_empty(), "nothing is sent yet");
    process.granted(at(20), call, 10, 5);
    let (call, request) = process.call();
    let Request::Release(released, Release::Now) = request else { panic!("{request:?}") };
    assert_eq!(released.owner, claim.owner);
    process.answer(at(21), call, Answer::Release(Ok(ReleaseOutcome::Released)));
    assert!(process.machine.is_idle());
}

/// Rule 6: an acquire that was never answered may still arrive, so the release
/// is repeated until it cannot.
#[test]
fn a_doubtful_acquire_is_released_twice() {
    let mut process = Process::new();
    let ticket = process.enqueue(at(0));
    let (call, _) = process.acquire();
    process.forget(at(5), ticket);
    process.answer(at(500), call, Answer::Acquire(Err(unanswered(Operation::Acquire))));
    let (call, _) = process.call();
    process.answer(at(510), call, Answer::Release(Ok(ReleaseOutcome::AlreadyLost)));
    assert!(!process.machine.is_idle(), "the acquire may come yet");
    process.tick(at(1_400));
    assert!(process.calls.is_empty());
    process.tick(at(1_520));
    let (call, request) = process.call();
    assert!(matches!(request, Request::Release(..)));
    process.answer(at(1_530), call, Answer::Release(Ok(ReleaseOutcome::Released)));
    assert!(process.machine.is_idle());
}

/// Row 2: a failed renewal is repeated until the deadline. The lock is held again when
/// it succeeds, and lost at the deadline when it does not.
#[test]
fn renewals_are_tried_until_the_deadline() {
    let mut process = Process::new();
    let ticket = process.enqueue(at(0));
    let (call, _) = process.acquire();
    process.granted(at(1), call, 10, 5);
    let mut now = 1_000;
    let mut tries = 0;
    while process.lost.is_empty() {
        process.tick(at(now));
        for (call, request) in std::mem::take(&mut process.calls) {
            if let Request::Renew(_) = request {
                tries += 1;
                process.answer(at(now), call, Answer::Renew(Err(unanswered(Operation::Renew))));
                assert!(matches!(
                    process.machine.status(at(now), ticket),
                    LeaseStatus::Held { certain: false, .. }
                ));
            }
        }
        now += 10;
    }
    assert_eq!(process.lost, [LossReason::Deadline]);
    assert!((2_940..=2_960).contains(&now), "lost at {now}");
    assert!((5..20).contains(&tries), "{tries} tries: neither given up nor a busy loop");
    assert_eq!(process.machine.status(at(now), ticket), LeaseStatus::Lost(LossReason::Deadline));
}

/// Rule 2: each hand-over has its own token; after the limit one call releases the lease
/// and requests a new one.
#[test]
fn handovers_use_up_the_grant() {
    let mut process = Process::new();
    let tickets: Vec<Ticket> = (0..5).map(|_| process.enqueue(at(0))).collect();
    let (call, first) = process.acquire();
    process.granted(at(1), call, 100, first.tokens);
    for (n, ticket) in tickets.iter().enumerate().take(3) {
        assert_eq!(process.token(*ticket), 100 + n as u64);
        assert!(process.calls.is_empty(), "no network");
        process.forget(at(2), *ticket);
    }
    let (call, second) = process.acquire();
    assert_eq!(second.instead_of, Some(first.owner));
    assert_ne!(second.owner, first.owner);
    process.granted(at(3), call, 200, second.tokens);
    assert_eq!(process.token(tickets[3]), 200);
}

/// A lease that is uncertain, or half over, is not handed over.
#[test]
fn an_unfit_lease_is_not_handed_over() {
    for late in [false, true] {
        let mut process = Process::new();
        let (one, two) = (process.enqueue(at(0)), process.enqueue(at(0)));
        let (call, claim) = process.acquire();
        process.granted(at(1), call, 100, claim.tokens);
        let mut now = 500;
        if !late {
            process.tick(at(1_000));
            let (call, _) = process.call();
            process.answer(at(1_001), call, Answer::Renew(Err(unanswered(Operation::Renew))));
            now = 1_002;
        }
        // The tenancy's limit is a second, so a late one is told by its age too.
        process.forget(at(if late { 1_600 } else { now }), one);
        assert!(process.waits(two));
        let (_, again) = process.acquire();
        assert_eq!(again.instead_of, Some(claim.owner));
    }
}

/// Rule 9: a waiter asks the backend again about once a second.
#[test]
fn a_waiter_looks_again() {
    let mut process = Process::new();
    let ticket = process.enqueue(at(0));
    let (call, claim) = process.acquire();
    process.queued(at(1), call);
    let due = process.machine.next_due();
    assert!(due > at(500) && due <= at(1_001), "{due:?}");
    process.tick(due);
    let (call, again) = process.acquire();
    assert_eq!(again.owner, claim.owner);
    process.granted(due, call, 7, 3);
    assert_eq!(process.token(ticket), 7);
}

/// A failed `try_lock` does not refuse those who wait.
#[test]
fn attempts_do_not_wait() {
    let mut process = Process::new();
    let attempt = process.enqueue_with(at(0), Mode::Exclusive, Wait::Try, Lane::Shared);
    let (call, claim) = process.acquire();
    assert!(!claim.queue);
    let waiter = process.enqueue(at(0));
    process.answer(
        at(1),
        call,
        Answer::Acquire(Ok(AcquireOutcome::Busy { holder: Some(holder(2)) })),
    );
    let (call, again) = process.acquire();
    assert!(again.queue && again.owner == claim.owner, "the same claim, now waiting");
    process.queued(at(2), call);
    let Outcome::Refused(Refusal::Busy(Some(by))) = process.machine.outcome(attempt) else {
        panic!("the attempt is answered")
    };
    assert_eq!(by.name, "client-2");
    assert!(process.waits(waiter));
}

/// Row 24: readers of a process share its lease until another process waits.
#[test]
fn readers_stop_joining_when_others_wait() {
    let mut process = Process::new();
    let read = |process: &mut Process, now| {
        process.enqueue_with(at(now), Mode::Shared, Wait::Until(Moment::NEVER), Lane::Shared)
    };
    let one = read(&mut process, 0);
    let (call, claim) = process.acquire();
    process.granted(at(1), call, 100, claim.tokens);
    let two = read(&mut process, 2);
    assert_eq!(process.token(one), process.token(two), "local readers share a claim");
    process.tick(at(1_000));
    let (call, _) = process.call();
    process.answer(at(1_001), call, Answer::Renew(Ok(RenewOutcome::Held { others_wait: true })));
    let three = read(&mut process, 1_002);
    let (call, own) = process.acquire();
    assert!(own.owner != claim.owner && own.instead_of.is_none(), "a claim of its own");
    process.queued(at(1_003), call);
    assert!(process.waits(three), "behind whoever waits");
    process.forget(at(1_004), one);
    process.forget(at(1_004), two);
    assert!(matches!(process.call().1, Request::Release(..)));
}

// -- the server -------------------------------------------------------------

fn claim(owner: u128, client: u64, mode: Mode) -> Claim {
    Claim {
        key: Key::new("k").expect("a key"),
        owner: Owner::from_bits(owner),
        mode,
        ttl: ms(3_000),
        queue: true,
        instead_of: None,
        tokens: 3,
        holder: holder(client),
        sent: Moment::default(),
    }
}

fn owners(sent: &[SentNotice]) -> Vec<u128> {
    sent.iter().map(|sent| sent.owner.bits()).collect()
}

/// Rows 18 and 23 in small: dead waiters are removed all at once, readers at the head of
/// the queue are granted together, and only they are notified.
#[test]
fn the_first_live_waiters_are_chosen() {
    let mut queue = LockTable::new(0, PlantedBug::default());
    let mut sent = Vec::new();
    let writer = claim(1, 1, Mode::Exclusive);
    assert!(matches!(queue.acquire(at(0), &writer, &mut sent), AcquireOutcome::Granted(_)));
    for dead in 10..20 {
        queue.acquire(at(0), &claim(dead, 2, Mode::Exclusive), &mut sent);
    }
    for reader in [30, 31] {
        queue.acquire(at(2_900), &claim(reader, 3, Mode::Shared), &mut sent);
    }
    queue.acquire(at(2_900), &claim(40, 4, Mode::Exclusive), &mut sent);
    queue.acquire(at(2_900), &claim(32, 3, Mode::Shared), &mut sent);
    assert!(sent.is_empty());
    assert!(matches!(
        queue.renew(at(2_950), &writer, &mut sent),
        RenewOutcome::Held { others_wait: true }
    ));
    let released = queue.release(at(3_100), &writer, Release::Now, &mut sent);
    assert_eq!(released, ReleaseOutcome::Released);
    assert_eq!(owners(&sent), [30, 31], "the writer in between is not overtaken");
}

/// Rule 2: tokens rise although the store lost its data.
#[test]
fn tokens_rise_over_a_restart_without_data() {
    let first_token = |queue: &mut LockTable, now| match queue.acquire(
        now,
        &claim(1, 1, Mode::Exclusive),
        &mut Vec::new(),
    ) {
        AcquireOutcome::Granted(grant) => grant.first + u64::from(grant.count) - 1,
        other => panic!("{other:?}"),
    };
    let before = first_token(&mut LockTable::new(1_000_000, PlantedBug::default()), at(100));
    let after = first_token(&mut LockTable::new(1_000_000, PlantedBug::default()), at(1_100));
    assert!(after > before);
    assert!(after < 1 << 53);
}

/// Expired entries are removed although nobody asks for their keys again.
#[test]
fn what_nobody_touches_is_swept() {
    let mut queue = LockTable::new(0, PlantedBug::default());
    for n in 0..10_000_u64 {
        let claim = Claim {
            key: Key::new(format!("job:{n}")).unwrap(),
            ..claim(u128::from(n), 1, Mode::Exclusive)
        };
        queue.acquire(at(n * 100), &claim, &mut Vec::new());
    }
    assert!(queue.in_use(at(1_000_000)) <= 30);
    assert!(queue.keys() < 3_000, "{} keys are kept", queue.keys());
}
