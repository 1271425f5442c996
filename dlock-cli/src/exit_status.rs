//! The exit statuses of the command. They follow `sysexits.h` where possible.

use dlock::ErrorKind;
use dlock_bench::interrupt::Interrupted;

/// Another client holds the lock, an audit was not exact, or the lock that was to be broken
/// has changed hands; try again later.
pub(crate) const BUSY: u8 = 75;
/// The lock was lost while the program ran under it.
pub(crate) const LOST: u8 = 76;
/// The backend cannot be reached.
pub(crate) const UNAVAILABLE: u8 = 69;
const DENIED: u8 = 77;
const CONFIG: u8 = 78;
/// A key or the value of an option is not valid.
pub(crate) const USAGE: u8 = 64;
/// Any other failure.
pub(crate) const FAILURE: u8 = 1;
/// The program cannot be run, as in a shell.
pub(crate) const NOT_RUNNABLE: u8 = 126;
/// The program was not found, as in a shell.
pub(crate) const NOT_FOUND: u8 = 127;

/// The part of `dlock --help` about exit statuses.
pub(crate) const HELP: &str = "\
Exit status:
   0  success
   1  failure
   2  the command line is not valid
  64  a key or the value of an option is not valid
  69  the backend cannot be reached or did not answer
  75  the lock is busy, (dlock inventory) the audit was not exact, or (dlock break) the lock
      has changed hands meanwhile: look, and try again later
  76  the lock was lost while the program ran
  77  the backend rejects the credentials, or they do not have the rights
  78  the URL or the configuration is not valid
 130  `sale` or `bench` was ended by Ctrl-C (143: by SIGTERM) and removed its data
`dlock run` otherwise ends with the status of its program: with 128 + n if signal n
ended it, with 126 if it cannot be run, with 127 if it is not found.";

/// The status of a program that was ended by a signal, as in a shell.
pub(crate) fn ended_by(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(FAILURE)
}

/// The exit status for an error.
pub(crate) fn of(error: &anyhow::Error) -> u8 {
    error.chain().find_map(known).unwrap_or(FAILURE)
}

fn known(error: &(dyn std::error::Error + 'static)) -> Option<u8> {
    if let Some(interrupted) = error.downcast_ref::<Interrupted>() {
        return Some(ended_by(interrupted.signal));
    }
    if error.is::<dlock_bench::UsageError>() {
        return Some(USAGE);
    }
    let reworded = error.downcast_ref::<crate::inventory::Reworded>().map(|it| &it.error);
    if let Some(error) = reworded.or_else(|| error.downcast_ref::<dlock_segment::Error>()) {
        return match error {
            dlock_segment::Error::Invalid(_) => Some(USAGE),
            dlock_segment::Error::Unknown(_) => Some(UNAVAILABLE),
            _ => None, // the error of the store is the next in the chain
        };
    }
    Some(match error.downcast_ref::<dlock::Error>()?.kind() {
        kind if kind.is_busy() => BUSY,
        ErrorKind::Lost => LOST,
        ErrorKind::Unavailable | ErrorKind::Unknown => UNAVAILABLE,
        ErrorKind::Denied => DENIED,
        ErrorKind::Config => CONFIG,
        ErrorKind::Invalid | ErrorKind::Unsupported => USAGE,
        _ => FAILURE,
    })
}
