//! The short forms of the soak of a sale; `dlock-sale-soak` runs it at any size.

use std::path::Path;

use dlock_testkit::sale::{Mix, Report, Soak, soak};

/// What the short forms have in common.
const SHORT: Soak = Soak {
    units: 20_000,
    attempts: 90_000,
    segments: 64,
    servers: 1,
    cluster: false,
    homes: 1,
    processes: 3,
    kills: 6,
    server_kills: 0,
    failovers: 0,
    lossy_failovers: 0,
    journal: 1_000_000,
    mix: Mix::Sale,
    seed: 7,
};

/// Six homes of a small sale.
const HOMES: Soak = Soak { units: 6_000, attempts: 24_000, segments: 4, homes: 6, ..SHORT };

async fn short(soak_of: Soak) -> Option<Report> {
    let program = Path::new(env!("CARGO_BIN_EXE_dlock-sale-soak"));
    let report = soak(program, soak_of).await?;
    println!("{report:?}");
    // As many as were in time: the workers go on while a primary of a Cluster is replaced.
    let enough = match soak_of.cluster {
        true => soak_of.kills.min(1),
        false => soak_of.kills * 3 / 4,
    };
    assert!((enough..=soak_of.kills).contains(&report.kills), "{report:?}");
    let Report { server_kills, failovers, lossy_failovers, .. } = report;
    assert_eq!(
        (server_kills, failovers, lossy_failovers),
        (soak_of.server_kills, soak_of.failovers, soak_of.lossy_failovers),
        "{report:?}"
    );
    assert!(report.answers > 0 && report.resizes > 0, "something of everything was done");
    assert!(report.entries >= report.operations, "each operation is in the journal: {report:?}");
    Some(report)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_soak_sells_exactly_what_there_was() {
    short(SHORT).await;
}

/// Refund, restock, resize, rebalance, confirm, cancel, extend: killed at any step,
/// the process or the server, none loses a unit, and each id has its effect once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_at_any_step_loses_no_unit() {
    short(Soak {
        units: 4_000,
        attempts: 12_000,
        segments: 16,
        kills: 48,
        server_kills: 8,
        mix: Mix::Settling,
        seed: 11,
        ..SHORT
    })
    .await;
}

/// Six homes on three servers, of which one is killed now and then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn homes_sell_exactly_what_there_was() {
    short(Soak { servers: 3, kills: 12, server_kills: 4, seed: 5, ..HOMES }).await;
}

/// Half of the units are sold from leases, by processes that are killed: the units of their
/// lots come back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leased_units_of_killed_processes_come_back() {
    short(Soak { servers: 3, server_kills: 2, mix: Mix::Leased, seed: 19, ..HOMES }).await;
}

/// Six homes in a Cluster whose primaries are killed and come back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn homes_in_a_cluster_sell_exactly_what_there_was() {
    short(Soak { cluster: true, server_kills: 2, seed: 13, ..HOMES }).await;
}

/// The replicas of killed primaries take over, with and without what was answered last: the
/// units add up, and the audit names what is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn homes_add_up_when_replicas_take_over() {
    short(Soak { cluster: true, failovers: 1, lossy_failovers: 2, seed: 17, ..HOMES }).await;
}
