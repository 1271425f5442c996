//! The simulation in CI. Any number of seeds by command:
//! `cargo run --release -p dlock-testkit --bin dlock-sim -- --seeds 1000000`

use std::time::Instant;

use dlock::machine::{Bug, Transition};
use dlock_testkit::sim::{Options, Report, replay_command, run};

#[test]
fn two_thousand_seeds_without_a_violation() {
    let mut total = Report::default();
    for seed in 0..2_000 {
        let report = run(seed, &Options::default());
        assert_eq!(report.violation, None, "replay: {}", replay_command(seed, None));
        total.admissions += report.admissions;
        total.handovers += report.handovers;
        total.losses += report.losses;
        total.faults += report.faults;
        total.message_faults += report.message_faults;
        total.coverage.add(&report.coverage);
    }
    // A world in which nothing happens would pass, too.
    assert!(total.admissions > 100_000, "{total:?}");
    assert!(total.handovers > 5_000, "{total:?}");
    assert!(total.losses > 500, "{total:?}");
    assert!(total.faults > 500, "{total:?}");
    assert!(total.message_faults > 5_000, "{total:?}");
    for transition in Transition::ALL {
        assert!(total.coverage.of(*transition) > 0, "{transition:?} was never reached");
    }
}

#[test]
fn the_same_seed_gives_the_same_log() {
    let options = Options { log: true, ..Options::default() };
    for seed in [3, 17, 84, 551, 7792] {
        let (one, two) = (run(seed, &options), run(seed, &options));
        assert!(one.log.len() > 1_000);
        assert_eq!(one, two, "seed {seed}");
    }
    assert_ne!(run(3, &options).log, run(4, &options).log);
}

/// A checker that never fails proves nothing. The bound is a number of seeds and not a time,
/// so that a busy machine finds the same; 20,000 seeds take less than a minute.
#[test]
fn every_planted_bug_is_found_within_20_000_seeds() {
    for plant in Bug::ALL {
        let options = Options { plant: Some(plant), log: false };
        let began = Instant::now();
        let found = (0..20_000)
            .find_map(|seed| run(seed, &options).violation.map(|violation| (seed, violation)));
        let Some((seed, violation)) = found else { panic!("{plant:?} was not found") };
        println!("{plant:?}: seed {seed} after {:?}: {violation}", began.elapsed());
    }
}
