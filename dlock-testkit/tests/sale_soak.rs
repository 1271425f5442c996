//! The short form of the soak of a sale; `dlock-sale-soak` runs it at any size.

use std::path::Path;

use dlock_testkit::sale::{Soak, soak};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_soak_sells_exactly_what_there_was() {
    let program = Path::new(env!("CARGO_BIN_EXE_dlock-sale-soak"));
    let wanted =
        Soak { units: 20_000, attempts: 90_000, segments: 64, processes: 3, kills: 6, seed: 7 };
    if let Some(report) = soak(program, wanted).await {
        println!("{report:?}");
        assert_eq!(report.kills, 6);
    }
}
