//! Skips tests whose server or program is not installed.

use std::io::Write as _;
use std::path::PathBuf;

/// The directory of programs that take long to build or to fetch.
pub fn cache() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from);
    cache.join("dlock-servers")
}

/// Checks that a server is installed: returns `is_there`, and prints `SKIPPED` if it
/// is false. With `DLOCK_REQUIRE_SERVERS=1`, as in CI, a missing server is a failure.
///
/// ```
/// if !dlock_testkit::servers::found("a shell", std::path::Path::new("/bin/sh").exists()) {
///     return;
/// }
/// ```
///
/// # Panics
/// If the server is missing and `DLOCK_REQUIRE_SERVERS` is set to anything but 0.
pub fn found(server: &str, is_there: bool) -> bool {
    let required = std::env::var_os("DLOCK_REQUIRE_SERVERS").is_some_and(|value| value != "0");
    missing(server, is_there, required)
}

fn missing(server: &str, is_there: bool, required: bool) -> bool {
    assert!(
        is_there || !required,
        "{server} is missing and DLOCK_REQUIRE_SERVERS is set; scripts/test all installs it"
    );
    if !is_there {
        skipped(&format!("{server} is missing; scripts/test all installs it"));
    }
    is_there
}

/// Prints that a test is skipped. The test harness does not capture this output.
pub fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_missing_server_is_skipped_unless_required() {
        assert!(super::missing("x", true, true));
        assert!(!super::missing("x", false, false));
        let required = std::panic::catch_unwind(|| super::missing("x", false, true));
        assert!(required.is_err());
    }
}
