use super::*;

fn record(mode: Mode, token: u64, from: u64, until: u64) -> Record {
    Record { key: "k".into(), mode, token, from, until, stale: None, who: "w".into() }
}

fn checked(records: &[Record]) -> RecordChecker {
    let mut checker = RecordChecker::default();
    for record in records {
        let parsed: Record = record.to_string().parse().unwrap();
        assert_eq!(parsed, *record, "what is written is what is read");
        checker.add(parsed);
    }
    checker.sweep(u64::MAX);
    assert_eq!(checker.checked, records.len() as u64);
    checker
}

use Mode::{Exclusive, Shared};

#[test]
fn one_after_the_other_is_fine_in_any_order_of_arrival() {
    let later = record(Exclusive, 2, 20, 30);
    let checker = checked(&[later, record(Exclusive, 1, 10, 20), record(Shared, 3, 30, 40)]);
    assert!(checker.violations.is_empty(), "{:?}", checker.violations);
}

#[test]
fn overlaps_are_found() {
    for (one, two) in [(Exclusive, Exclusive), (Exclusive, Shared), (Shared, Exclusive)] {
        let checker = checked(&[record(one, 1, 10, 21), record(two, 2, 20, 30)]);
        assert_eq!(checker.violations.len(), 1, "{one:?} {two:?}");
    }
    let readers = checked(&[record(Shared, 1, 10, 21), record(Shared, 1, 20, 30)]);
    assert!(readers.violations.is_empty());
    let permits = Mode::Permits { count: 2, of: 3 };
    let checker = checked(&[record(permits, 0, 10, 21), record(permits, 0, 20, 30)]);
    assert_eq!(checker.violations.len(), 1);
}

#[test]
fn tokens_must_rise() {
    for (one, two) in [(Exclusive, Exclusive), (Exclusive, Shared), (Shared, Exclusive)] {
        let checker = checked(&[record(one, 2, 10, 20), record(two, 2, 20, 30)]);
        assert_eq!(checker.violations.len(), 1, "{one:?} {two:?}");
    }
}

#[test]
fn stale_writes_are_rejected_once_overtaken() {
    let mut stale = record(Exclusive, 1, 10, 20);
    stale.stale = Some(40);
    let checker = checked(&[stale.clone(), record(Exclusive, 2, 30, 50)]);
    assert_eq!((checker.stale, checker.violations.len()), ((1, 1), 0));
    let checker = checked(&[stale, record(Exclusive, 2, 50, 60)]);
    assert_eq!((checker.stale, checker.violations.len()), ((1, 0), 0));
}

#[test]
fn a_loss_of_data_excuses_overlaps_but_later_tokens_rise() {
    let now = crate::process::now();
    let mut checker = RecordChecker::default();
    checker.data_lost(15, Duration::ZERO);
    let later = now + 1_000_000_000;
    checker.add(record(Exclusive, 5, 10, 30));
    checker.add(record(Exclusive, 9, 20, 40));
    checker.add(record(Exclusive, 6, 25, 30)); // handed over by the holder from before
    checker.add(record(Exclusive, 8, later, later + 1));
    checker.sweep(u64::MAX);
    assert_eq!(checker.violations.len(), 1, "{:?}", checker.violations);
    assert!(checker.violations[0].contains("does not rise above 9"));
    assert_eq!(checker.excused, 4);
}

#[test]
fn a_broken_holder_is_told_before_the_next_one_is_let_in() {
    let broken = |records: &[Record], is_paused: bool| {
        let mut checker = RecordChecker::default();
        checker.broken("k", 20, 30, 1_000);
        if is_paused {
            checker.paused("w", 25, 60);
        }
        records.iter().for_each(|record| checker.add(record.clone()));
        checker.sweep(u64::MAX);
        (checker.violations.len(), checker.excused_by_pause)
    };
    let told = [record(Exclusive, 1, 10, 29), record(Exclusive, 2, 31, 50)];
    assert_eq!(broken(&told, false), (0, 0));
    let untold = [record(Exclusive, 1, 10, 40), record(Exclusive, 2, 31, 50)];
    assert_eq!(broken(&untold, false), (2, 0));
    assert_eq!(broken(&untold, true), (0, 2));
    let let_in = [record(Exclusive, 1, 10, 26), record(Exclusive, 2, 25, 50)];
    assert_eq!(broken(&let_in, false), (1, 0));
}

/// Guards overlap across a failover.
#[test]
fn a_failover_excuses_overlaps_until_its_losers_are_told() {
    let over = |records: &[Record]| {
        let mut checker = RecordChecker::default();
        checker.failed_over(15, 50);
        records.iter().for_each(|record| checker.add(record.clone()));
        checker.sweep(u64::MAX);
        (checker.violations.len(), checker.excused)
    };
    let successor = record(Exclusive, 9, 20, 90);
    assert_eq!(over(&[record(Exclusive, 5, 10, 40), successor.clone()]), (0, 1));
    let late = record(Exclusive, 5, 10, 60);
    assert_eq!(over(&[late, successor.clone()]), (1, 0), "a loser is told in time");
    let early = record(Exclusive, 9, 12, 30);
    assert_eq!(over(&[record(Exclusive, 5, 10, 40), early]), (1, 0), "it was before");
    let older = record(Exclusive, 6, 25, 30);
    assert_eq!(over(&[successor.clone(), older]), (0, 2), "a fence rejects the older one");
    let same = record(Exclusive, 9, 25, 30);
    assert_eq!(over(&[successor.clone(), same]), (1, 1), "no fence tells them apart");
    let afterwards = record(Exclusive, 6, 95, 99);
    assert_eq!(over(&[successor, afterwards]), (1, 0), "later tokens rise");
    let permits = Mode::Permits { count: 2, of: 3 };
    let told = [record(permits, 0, 10, 40), record(permits, 0, 20, 90)];
    assert_eq!(over(&told), (0, 1));
    let untold = [record(permits, 0, 10, 60), record(permits, 0, 20, 90)];
    assert_eq!(over(&untold), (1, 0));
}
