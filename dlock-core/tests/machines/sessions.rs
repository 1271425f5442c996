//! The machine over a store whose locks live by a session: from when a grant counts, and
//! what becomes of everybody when the session ends.

use std::time::Duration;

use dlock::backend::{Answer, Notice, Owner, Request, SessionTerm};
use dlock::machine::{Bug, LeaseStatus, PlantedBug, Ticket};
use dlock::{Error, ErrorKind, LossReason, Operation};

use super::process::{Process, at};

const TERM: Duration = Duration::from_millis(2_000);
/// What is left of the term for the drift of clocks.
const CERTAIN: Duration = Duration::from_millis(1_960);

fn term(as_of: u64) -> SessionTerm {
    SessionTerm { as_of: at(as_of), term: TERM }
}

/// A lock was asked for at 1,000 ms and granted at 1,100 ms by a session whose last answered
/// keep-alive was sent at 400 ms.
fn held(process: &mut Process) -> Ticket {
    let ticket = process.enqueue(at(1_000));
    let (call, _) = process.call();
    process.session_granted(at(1_100), call, term(400));
    assert!(process.is_admitted(ticket));
    ticket
}

#[test]
fn a_grant_counts_from_the_keep_alive_and_not_from_the_call() {
    let mut process = Process::new();
    let ticket = held(&mut process);
    assert_eq!(process.held_until(at(1_100), ticket), at(400) + CERTAIN);
    let lost = at(400) + CERTAIN;
    assert!(process.is_lost(lost, ticket));
}

/// The test above can fail.
#[test]
fn a_machine_that_counts_from_the_answer_is_found() {
    let mut process = Process::with_bug(PlantedBug::with(Some(Bug::LeaseCountedFromReply)));
    let ticket = held(&mut process);
    assert_eq!(process.held_until(at(1_100), ticket), at(1_100) + CERTAIN);
}

#[test]
fn a_renewal_counts_from_the_keep_alive() {
    let mut process = Process::new();
    let ticket = held(&mut process);
    let due = process.next_due();
    assert!(due > at(1_100) && due < at(1_400), "{due:?}");
    let (call, _) = process.renew();
    process.session_renewed(at(1_500), call, term(1_150));
    assert_eq!(process.held_until(at(1_500), ticket), at(1_150) + CERTAIN);
}

/// An answer that tells of an older keep-alive takes nothing back.
#[test]
fn a_deadline_never_moves_back() {
    let mut process = Process::new();
    let ticket = held(&mut process);
    process.next_due();
    let (call, _) = process.renew();
    process.session_renewed(at(1_500), call, term(300));
    assert_eq!(process.held_until(at(1_500), ticket), at(400) + CERTAIN);
}

/// A session whose keep-alives are not answered is not asked again and again (I5).
#[test]
fn an_old_keep_alive_makes_no_busy_loop() {
    let mut process = Process::new();
    held(&mut process);
    let mut now = at(1_100);
    let mut renewals = 0;
    while process.lost.is_empty() {
        now = process.next_due().max(now);
        for (call, request) in std::mem::take(&mut process.calls) {
            if matches!(request, Request::Renew(_)) {
                renewals += 1;
                process.session_renewed(now, call, term(400));
            }
        }
    }
    assert_eq!(process.lost, [LossReason::Deadline]);
    assert!(now >= at(400) + CERTAIN && now < at(2_400), "{now:?}");
    assert!((2..=8).contains(&renewals), "{renewals}");
}

/// A grant that tells of a keep-alive which is too old is no grant.
#[test]
fn a_grant_of_a_dead_session_admits_nobody() {
    let (mut process, ticket, call, _) = Process::acquiring(at(5_000));
    process.session_granted(at(5_010), call, term(3_000));
    assert!(!process.is_admitted(ticket));
    let due = process.next_due();
    assert!(due > at(5_010), "not at once");
    let (call, _) = process.acquire(); // it is asked for again
    process.session_granted(due, call, term(5_000));
    assert!(process.is_admitted(ticket));
}

#[test]
fn a_place_that_lives_by_the_session_is_not_prolonged_every_second() {
    let (mut process, _, call, _) = Process::acquiring(at(0));
    process.session_queued(at(10), call);
    let due = process.next_due();
    assert!(due >= at(7_000) && due <= at(10_100), "{due:?}");
}

/// The key became free after the store had answered and before the answer was here. It is
/// told once, so it is asked for again at once, and not ten seconds later.
#[test]
fn a_wake_up_that_overtakes_the_answer_counts() {
    let (mut process, ticket, call, claim) = Process::acquiring(at(0));
    process.notice(at(5), claim.owner, Notice::TryAgain);
    assert!(process.calls.is_empty(), "an acquire is unanswered");
    process.session_queued(at(10), call);
    let due = process.next_due();
    assert!(due <= at(11), "{due:?}");
    let (call, again) = process.acquire();
    assert_eq!(again.owner, claim.owner);
    process.session_granted(at(15), call, term(10));
    assert!(process.is_admitted(ticket));
}

/// The place in the queue lives by the session. Who gives up while the store cannot be
/// reached leaves it behind unless it is released later.
#[test]
fn a_place_is_given_back_after_a_look_that_failed() {
    let (mut process, ticket, call, _) = Process::acquiring(at(0));
    process.session_queued(at(10), call);
    let due = process.next_due();
    let (call, claim) = process.acquire();
    let failed = Error::new(ErrorKind::Unavailable, Operation::Acquire);
    process.answer(due, call, Answer::Acquire(Err(failed)));
    process.forget(due, ticket);
    assert_eq!(process.release().1.owner, claim.owner);
}

/// A grant that came too late is still the store's: who gives up then gives it back.
#[test]
fn a_grant_that_came_too_late_is_given_back() {
    let (mut process, ticket, call, claim) = Process::acquiring(at(5_000));
    process.session_granted(at(5_010), call, term(3_000));
    process.forget(at(5_020), ticket);
    assert_eq!(process.release().1.owner, claim.owner);
}

#[test]
fn the_end_of_the_session_is_told_to_every_guard_at_once() {
    let mut process = Process::new();
    let held: Vec<Ticket> = ["a", "b", "c"]
        .map(|key| {
            let ticket = process.enqueue_key(at(0), key);
            let (call, _) = process.call();
            process.session_granted(at(5), call, term(0));
            ticket
        })
        .into();
    let waiting = process.enqueue_key(at(6), "d");
    let (call, queued) = process.call();
    process.session_queued(at(7), call);
    process.step(|machine, out| machine.session_lost(at(100), out));
    assert_eq!(process.lost, vec![LossReason::SessionLost; 3]);
    for ticket in held {
        let status = process.machine.status(at(100), ticket);
        assert_eq!(status, LeaseStatus::Lost(LossReason::SessionLost));
    }
    // Who waits asks again at once, as the same owner, and its grant counts.
    let (call, request) = process.call();
    let owner = |request: &Request| -> Owner { request.claim().owner };
    assert_eq!(owner(&request), owner(&queued));
    process.session_granted(at(110), call, term(105));
    assert!(process.is_admitted(waiting));
}

/// An answer that was under way when the session ended tells of what is gone.
#[test]
fn a_grant_of_the_session_that_ended_is_void() {
    let (mut process, ticket, call, _) = Process::acquiring(at(0));
    process.step(|machine, out| machine.session_lost(at(50), out));
    assert!(process.calls.is_empty(), "an acquire is unanswered");
    process.session_granted(at(60), call, term(0));
    assert!(!process.is_admitted(ticket), "it was the old session's");
    let due = process.next_due();
    assert!(due < at(1_000), "{due:?}");
    let (call, _) = process.call();
    process.session_granted(due, call, term(55));
    assert!(process.is_admitted(ticket));
}

/// The same for a place in the queue.
#[test]
fn a_place_of_the_session_that_ended_is_taken_anew() {
    let (mut process, _, call, _) = Process::acquiring(at(0));
    process.step(|machine, out| machine.session_lost(at(50), out));
    process.session_queued(at(60), call);
    let due = process.next_due();
    assert!(due <= at(61), "{due:?}");
    process.acquire();
}
