//! The short forms of the soak of a sale; `dlock-sale-soak` runs it at any size.

use std::path::Path;

use dlock_testkit::sale::{Mix, Report, Soak, soak};

async fn short(soak_of: Soak) -> Option<Report> {
    let program = Path::new(env!("CARGO_BIN_EXE_dlock-sale-soak"));
    let report = soak(program, soak_of).await?;
    println!("{report:?}");
    let enough = |kills: u64, of: u64| kills <= of && kills * 4 >= of * 3;
    assert!(enough(report.kills, soak_of.kills), "as many as were in time: {report:?}");
    assert!(enough(report.server_kills, soak_of.server_kills), "{report:?}");
    assert!(report.answers > 0 && report.resizes > 0, "something of everything was done");
    assert!(report.entries >= report.operations, "each operation is in the journal: {report:?}");
    Some(report)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_soak_sells_exactly_what_there_was() {
    short(Soak {
        units: 20_000,
        attempts: 90_000,
        segments: 64,
        servers: 1,
        homes: 1,
        processes: 3,
        kills: 6,
        server_kills: 0,
        journal: 1_000_000,
        mix: Mix::Sale,
        seed: 7,
    })
    .await;
}

/// Refund, restock, resize, rebalance, confirm, cancel, extend: killed at any step,
/// the process or the server, none loses a unit, and each id has its effect once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_at_any_step_loses_no_unit() {
    short(Soak {
        units: 4_000,
        attempts: 12_000,
        segments: 16,
        servers: 1,
        homes: 1,
        processes: 3,
        kills: 48,
        server_kills: 8,
        journal: 1_000_000,
        mix: Mix::Settling,
        seed: 11,
    })
    .await;
}

/// Six homes on three servers, of which one is killed now and then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn homes_sell_exactly_what_there_was() {
    short(Soak {
        units: 6_000,
        attempts: 24_000,
        segments: 4,
        servers: 3,
        homes: 6,
        processes: 3,
        kills: 12,
        server_kills: 4,
        journal: 1_000_000,
        mix: Mix::Sale,
        seed: 5,
    })
    .await;
}
