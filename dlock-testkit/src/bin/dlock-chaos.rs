//! Random faults on real processes with a real Redis.
//!
//! ```text
//! dlock-chaos --minutes 60 [--processes 8] [--tasks 16] [--seed N]
//! ```
//!
//! Prints one line of JSON; ends with failure on any violation.

fn main() -> std::process::ExitCode {
    dlock_testkit::chaos::command(std::env::args().skip(1))
}
