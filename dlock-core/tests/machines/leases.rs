//! The claims of a process at the backend: from when a lease counts, how it is renewed,
//! released, broken and asked for again.

use dlock::backend::{Answer, Moment, Notice, Owner, Release, RenewOutcome, Request};
use dlock::machine::{CallId, LeaseStatus, Ticket};
use dlock::{LossReason, Operation, ReleaseOutcome};

use super::process::{Process, at, unanswered};

fn broken() -> Notice {
    Notice::Lost(LossReason::Broken { by: "an operator".into() })
}

/// Rule 3: a lease counts from before its request was sent, minus the margin, however
/// long the answer took.
#[test]
fn a_deadline_counts_from_the_sending() {
    let (mut process, ticket, call, _) = Process::acquiring(at(1_000));
    process.granted(at(1_900), call, 10, 5);
    assert_eq!(process.token(ticket), 10);
    assert_eq!(process.held_until(at(1_900), ticket), at(1_000 + 3_000 - 60));
    // A third later it is renewed, counted from that sending.
    process.tick(at(2_000));
    let (call, _) = process.renew();
    process.renewed(at(2_800), call, false);
    assert_eq!(process.held_until(at(2_800), ticket), at(2_000 + 3_000 - 60));
}

/// A grant that arrives after its ttl is not used.
#[test]
fn a_late_grant_is_asked_for_again() {
    let (mut process, ticket, call, first) = Process::acquiring(at(0));
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
    let (mut process, ticket, call, claim) = Process::acquiring(at(0));
    process.queued(at(1), call);
    process.handed_over(at(2_950), claim.owner, 50, claim.sent);
    assert!(process.waits(ticket), "its three seconds were over");
    let (call, _) = process.acquire();
    process.queued(at(2_960), call);
    process.handed_over(at(3_000), claim.owner, 50, at(2_950));
    assert_eq!(process.token(ticket), 50);
    assert_eq!(process.held_until(at(3_000), ticket), at(2_950 + 3_000 - 60));
    assert!(process.calls.is_empty(), "most are released before it pays to confirm them");
    process.tick(at(3_100));
    process.renew();
}

/// The notice may be late, and then half the time is over.
#[test]
fn a_late_handover_is_confirmed_at_once() {
    let (mut process, ticket, call, claim) = Process::acquiring(at(0));
    process.queued(at(1), call);
    process.handed_over(at(1_500), claim.owner, 50, claim.sent);
    assert_eq!(process.token(ticket), 50);
    process.tick(at(1_500));
    process.renew();
}

/// A lease that is handed over and released at once costs one call, the release.
#[test]
fn a_short_lease_that_was_handed_over_is_not_confirmed() {
    let (mut process, ticket, call, claim) = Process::acquiring(at(0));
    process.queued(at(1), call);
    process.handed_over(at(500), claim.owner, 50, claim.sent);
    process.tick(at(549));
    process.forget(at(549), ticket);
    let (call, _) = process.release();
    process.answer(at(550), call, Answer::Release(Ok(ReleaseOutcome::Released)));
    assert!(process.machine.is_idle());
}

/// Rule 6, row 21: no release while the acquire is unanswered.
#[test]
fn a_release_does_not_overtake_its_acquire() {
    let (mut process, ticket, call, claim) = Process::acquiring(at(0));
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
    let (mut process, ticket, call, _) = Process::acquiring(at(0));
    process.forget(at(5), ticket);
    process.answer(at(500), call, Answer::Acquire(Err(unanswered(Operation::Acquire))));
    let (call, _) = process.call();
    process.answer(at(510), call, Answer::Release(Ok(ReleaseOutcome::AlreadyLost)));
    assert!(!process.machine.is_idle(), "the acquire may come yet");
    process.tick(at(1_400));
    assert!(process.calls.is_empty());
    process.tick(at(1_520));
    let (call, _) = process.release();
    process.answer(at(1_530), call, Answer::Release(Ok(ReleaseOutcome::Released)));
    assert!(process.machine.is_idle());
}

/// Row 2: a failed renewal is repeated until the deadline. The lock is held again when
/// it succeeds, and lost at the deadline when it does not.
#[test]
fn renewals_are_tried_until_the_deadline() {
    let (mut process, ticket, call, _) = Process::acquiring(at(0));
    process.granted(at(1), call, 10, 5);
    let mut now = 1_000;
    let mut tries = 0;
    while process.lost.is_empty() {
        process.tick(at(now));
        for (call, request) in std::mem::take(&mut process.calls) {
            if let Request::Renew(_) = request {
                tries += 1;
                process.renewal_unanswered(at(now), call);
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

/// Row 28: the notice of a break may overtake the grant that it is about, whether that
/// comes as an answer or as a notice. Such a grant is void.
#[test]
fn an_early_break_voids_its_grant() {
    for by_notice in [false, true] {
        let (mut process, ticket, call, claim) = Process::acquiring(at(0));
        if by_notice {
            process.queued(at(1), call);
        }
        process.notice(at(2), claim.owner, broken());
        if by_notice {
            process.handed_over(at(3), claim.owner, 10, claim.sent);
        } else {
            process.granted(at(3), call, 10, 5);
            process.tick(at(500));
        }
        assert!(process.waits(ticket), "it was taken away before");
        let (call, again) = process.acquire();
        assert_eq!(again.owner, claim.owner);
        process.granted(at(501), call, 20, 5);
        assert_eq!(process.token(ticket), 20, "the next grant counts");
    }
}

/// The lock was handed over while an acquire of the same owner is on its way.
fn handed_over_while_asking_again() -> (Process, Ticket, CallId, Owner) {
    let (mut process, ticket, call, claim) = Process::acquiring(at(0));
    process.queued(at(1), call);
    process.tick(at(1_000));
    let (call, _) = process.acquire();
    process.handed_over(at(1_001), claim.owner, 10, at(1_000));
    assert_eq!(process.token(ticket), 10);
    (process, ticket, call, claim.owner)
}

/// Rule 6, row 28: a lock is broken while an acquire of its owner is on its way. If that
/// one is granted, it is released.
#[test]
fn a_break_leaves_no_ghost_of_a_late_acquire() {
    let (mut process, ticket, call, owner) = handed_over_while_asking_again();
    process.notice(at(1_002), owner, broken());
    assert!(process.is_lost(at(1_002), ticket));
    process.granted(at(1_003), call, 20, 5);
    assert_eq!(process.release().1.owner, owner);
}

/// The same if the answer to that acquire is here before the notice of the break.
#[test]
fn a_break_that_is_told_late_leaves_no_ghost() {
    let (mut process, ticket, call, owner) = handed_over_while_asking_again();
    process.granted(at(1_002), call, 20, 5); // it was applied after the break
    process.notice(at(1_003), owner, broken());
    assert!(process.is_lost(at(1_003), ticket));
    assert_eq!(process.release().1.owner, owner);
}

/// After a failover a lease is renewed at once, not a third of its ttl later, and a waiter
/// asks again.
#[test]
fn a_store_that_was_found_again_is_asked_at_once() {
    let (mut process, holding, call, _) = Process::acquiring(at(0));
    process.granted(at(0), call, 1, 4);
    process.step(|machine, actions| machine.ask_again(at(10), actions));
    let (call, _) = process.renew();
    process.step(|machine, actions| machine.ask_again(at(11), actions));
    assert!(process.calls.is_empty(), "it is asked already");
    // That answer may come from before, so it is asked once more.
    process.renewed(at(12), call, false);
    process.tick(at(12));
    let (call, _) = process.renew();
    process.answer(at(13), call, Answer::Renew(Ok(RenewOutcome::Lost)));
    assert_eq!(process.lost, [LossReason::Forgotten]);
    assert!(process.is_lost(at(13), holding));

    let (mut process, _, call, first) = Process::acquiring(at(0));
    process.queued(at(1), call);
    process.step(|machine, actions| machine.ask_again(at(10), actions));
    let (_, again) = process.acquire();
    assert_eq!(again.owner, first.owner, "its place in the queue is kept if there is one");
}

/// A hand-over that claims to come from the future counts from now.
#[test]
fn a_hand_over_from_the_future_counts_from_now() {
    let (mut process, ticket, call, claim) = Process::acquiring(at(0));
    process.queued(at(1), call);
    process.handed_over(at(10), claim.owner, 1, Moment::from_nanos(u64::MAX - 1));
    assert!(process.is_admitted(ticket));
    process.calls.clear();
    let LeaseStatus::Held { until, .. } = process.machine.status(at(10), ticket) else {
        panic!("it is held");
    };
    assert!(until <= at(10) + claim.ttl, "{until:?}");
}
