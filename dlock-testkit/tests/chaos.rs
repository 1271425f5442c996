//! A short chaos run, as CI has it. For a longer one:
//! `cargo run --release -p dlock-testkit --bin dlock-chaos -- --minutes 60`

use std::process::Command;

use dlock_testkit::redis::RedisServer;
use serde_json::Value;

#[test]
fn random_faults_for_the_better_part_of_a_minute() {
    if RedisServer::start().is_none() {
        return;
    }
    let output = Command::new(env!("CARGO_BIN_EXE_dlock-chaos"))
        .args(["--seconds", "50", "--faults-per-minute", "90"])
        .output()
        .expect("the program runs");
    let (said, log) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{said}");
    let summary: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}\n{log}"));
    assert!(output.status.success(), "{said}\n{log}");
    assert_eq!(summary["violations"].as_array().map(Vec::len), Some(0), "{said}");
    assert_eq!(summary["left_behind"], 0, "{said}");
    let number = |name: &str| summary[name].as_u64().unwrap_or(0);
    assert!(number("faults") >= 10 && number("cycles") >= 2_000, "too little happened: {said}");
    assert!(number("checked") >= number("cycles"), "{said}");
}
