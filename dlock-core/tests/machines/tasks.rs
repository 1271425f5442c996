//! The tasks of a process that want one key: hand-overs, waiting, readers that share a
//! lease, and locks inside a lock.

use dlock::Mode;
use dlock::backend::{AcquireOutcome, Answer, Grant, Moment, RenewOutcome};
use dlock::machine::{HandoverLimits, Outcome, QueueScope, Refusal, Ticket, Wait};

use super::process::{Process, at, holder, ms};

/// A reader asks for the lock, and waits for it.
fn read(process: &mut Process, now: u64, scope: QueueScope) -> Ticket {
    process.enqueue_with(at(now), Mode::Shared, Wait::Until(Moment::NEVER), scope)
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

/// While a lease is handed over, more tokens are asked for; the queue does not wait.
#[test]
fn a_lease_that_nobody_else_wants_is_extended_while_it_is_handed_over() {
    for others_wait in [false, true] {
        let mut process =
            Process::with_handover(HandoverLimits { count: 3, time: ms(5), extend_after: 2 });
        let tickets: Vec<Ticket> = (0..9).map(|_| process.enqueue(at(0))).collect();
        let (call, first) = process.acquire();
        process.granted(at(1), call, 100, first.tokens);
        process.forget(at(2), tickets[0]);
        assert_eq!(process.token(tickets[1]), 101, "handed over, and the next term is asked for");
        let (call, renewal) = process.renew();
        assert_eq!((renewal.owner, renewal.tokens), (first.owner, 5));
        process.forget(at(3), tickets[1]);
        assert_eq!(process.token(tickets[2]), 102, "hand-overs go on meanwhile");
        assert!(process.calls.is_empty());
        if others_wait {
            process.renewed(at(4), call, others_wait);
            process.forget(at(7), tickets[2]);
            assert!(process.waits(tickets[3]), "the turn ends as before");
            assert_eq!(process.acquire().1.instead_of, Some(first.owner));
            continue;
        }
        let grant = Grant { first: 200, count: 5 };
        process.answer(at(4), call, Answer::Renew(Ok(RenewOutcome::Extended(grant))));
        process.forget(at(4), tickets[2]);
        assert_eq!(process.token(tickets[3]), 200, "the new tokens, and a new turn");
        let (call, _) = process.call();
        process.forget(at(5), tickets[3]);
        process.forget(at(5), tickets[4]);
        assert_eq!(process.token(tickets[5]), 202);
        process.forget(at(9), tickets[5]);
        assert!(process.waits(tickets[6]), "its time is over, but an answer is on its way");
        assert!(process.calls.is_empty());
        process.renewal_unanswered(at(9), call);
        assert_eq!(process.acquire().1.instead_of, Some(first.owner));
    }
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
            process.renewal_unanswered(at(1_001), call);
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
    let (mut process, ticket, call, claim) = Process::acquiring(at(0));
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
    let attempt = process.enqueue_with(at(0), Mode::Exclusive, Wait::Try, QueueScope::Shared);
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
    let one = read(&mut process, 0, QueueScope::Shared);
    let (call, claim) = process.acquire();
    process.granted(at(1), call, 100, claim.tokens);
    let two = read(&mut process, 2, QueueScope::Shared);
    assert_eq!(process.token(one), process.token(two), "local readers share a claim");
    process.tick(at(1_000));
    let (call, _) = process.call();
    process.renewed(at(1_001), call, true);
    let three = read(&mut process, 1_002, QueueScope::Shared);
    let (call, own) = process.acquire();
    assert!(own.owner != claim.owner && own.instead_of.is_none(), "a claim of its own");
    process.queued(at(1_003), call);
    assert!(process.waits(three), "behind whoever waits");
    process.forget(at(1_004), one);
    process.forget(at(1_004), two);
    process.release();
}

/// Rule 15: a reader that is nested may outlive its parent. When it leaves, its lease is
/// released, also if the lease was retired meanwhile.
#[test]
fn a_nested_reader_outlives_its_parent_in_a_retired_lease() {
    let mut process = Process::new();
    let parent = read(&mut process, 0, QueueScope::Shared);
    let (call, claim) = process.acquire();
    process.granted(at(1), call, 100, claim.tokens);
    let nested = read(&mut process, 2, QueueScope::Nested(parent));
    assert_eq!(process.token(nested), 100);
    process.forget(at(3), parent);
    let _next = read(&mut process, 1_500, QueueScope::Shared); // too late to join
    process.acquire();
    process.forget(at(1_501), nested);
    assert_eq!(process.release().1.owner, claim.owner);
}

/// Rule 16: nobody gets in inside a lock whose holder was told that it is over.
#[test]
fn nobody_enters_a_revoked_lock() {
    let (mut process, parent, call, _) = Process::acquiring(at(0));
    process.granted(at(1), call, 10, 5);
    process.step(|machine, actions| machine.revoke_all(actions));
    let (mode, scope) = (Mode::Exclusive, QueueScope::Nested(parent));
    let refused = process.request(at(2), "k", mode, Wait::Try, scope);
    assert!(matches!(refused, Err(Refusal::Lost)), "{refused:?}");
}

/// The first answer is waited for as long as by a task that tries once, however short the
/// wait is; after it the wait counts.
#[test]
fn a_short_wait_is_not_worse_than_none() {
    let short = Wait::For(ms(5));
    let mut process = Process::new();
    let first = process.enqueue_with(at(0), Mode::Exclusive, short, QueueScope::Shared);
    let second = process.enqueue_with(at(0), Mode::Exclusive, short, QueueScope::Shared);
    process.tick(at(6));
    assert!(process.waits(first) && process.waits(second), "nothing was answered yet");
    let (call, _) = process.acquire();
    process.granted(at(20), call, 1, 8);
    assert!(process.is_admitted(first));
    let Outcome::Refused(Refusal::TimedOut { holder: Some(_), trouble: None }) =
        process.machine.outcome(second)
    else {
        panic!("it is behind the first, and its wait is over");
    };

    let mut process = Process::new();
    let ticket = process.enqueue_with(at(0), Mode::Exclusive, short, QueueScope::Shared);
    process.tick(at(6));
    let (call, _) = process.acquire();
    process.queued(at(20), call);
    let Outcome::Refused(Refusal::TimedOut { holder: Some(_), trouble: None }) =
        process.machine.outcome(ticket)
    else {
        panic!("somebody else holds it, and the wait is over");
    };

    let mut process = Process::new();
    let ticket = process.enqueue_with(at(0), Mode::Exclusive, short, QueueScope::Shared);
    process.tick(at(6));
    process.tick(at(999));
    assert!(process.waits(ticket));
    process.tick(at(1_000));
    let Outcome::Refused(Refusal::TimedOut { trouble: Some(_), .. }) =
        process.machine.outcome(ticket)
    else {
        panic!("nothing was answered in the time of an attempt");
    };
}
