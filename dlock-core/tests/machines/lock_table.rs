//! Tests of the table of locks that a server keeps, step by step.

use dlock::backend::memory::lock_table::{LockTable, SentNotice};
use dlock::backend::{AcquireOutcome, Claim, Moment, Owner, Release, RenewOutcome};
use dlock::machine::PlantedBug;
use dlock::{Key, Mode, ReleaseOutcome};

use super::process::{at, holder, ms};

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
