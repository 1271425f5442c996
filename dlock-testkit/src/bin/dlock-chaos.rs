//! Random faults on real processes with a real store.
//!
//! ```text
//! dlock-chaos --minutes 60 [--topology single|sentinel|cluster|redlock|postgres|mariadb|sqlite|
//!             zookeeper|etcd|consul]
//!             [--processes 8] [--tasks 16] [--seed N] [--faults Cut,KillWorker]
//!             [--slack 500]
//! dlock-chaos --list-faults
//! ```
//!
//! Prints one line of JSON; ends with failure on any violation.

fn main() -> std::process::ExitCode {
    dlock_testkit::chaos::command(std::env::args().skip(1))
}
