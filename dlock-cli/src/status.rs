//! With what the command ends: `sysexits.h` where it has a word for it.

use dlock::ErrorKind;
use dlock_bench::interrupt::Interrupted;

/// Somebody else holds the lock: try again later.
pub(crate) const BUSY: u8 = 75;
/// The lock was lost while the program ran under it.
pub(crate) const LOST: u8 = 76;
/// The backend cannot be reached.
pub(crate) const UNAVAILABLE: u8 = 69;
const DENIED: u8 = 77;
const CONFIG: u8 = 78;
const USAGE: u8 = 64;
/// Something else went wrong.
pub(crate) const FAILURE: u8 = 1;
/// The program cannot be run, as in a shell.
pub(crate) const NOT_RUNNABLE: u8 = 126;
/// The program is not there, as in a shell.
pub(crate) const NOT_FOUND: u8 = 127;

/// What `dlock --help` says about it.
pub(crate) const HELP: &str = "\
Exit status:
   0  done
   1  failed
   2  the command line is wrong
  64  a key or an option is out of bounds
  69  the backend cannot be reached, or did not answer
  75  somebody else holds the lock
  76  the lock was lost while the program ran
  77  the backend refuses the credentials or rights
  78  the URL or the configuration is wrong
 130  ended by Ctrl-C (143: by SIGTERM), after what `sale` or `bench` stored was removed
  `dlock run` else ends as its program does: with its status, with 128 + n when
  signal n ended it, 126 or 127 when it cannot be run or found.";

/// As a shell tells of a signal.
pub(crate) fn ended_by(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(FAILURE)
}

/// The status that tells of this error.
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
    if let Some(error) = error.downcast_ref::<dlock_segment::Error>() {
        return match error {
            dlock_segment::Error::Invalid(_) => Some(USAGE),
            dlock_segment::Error::Unknown(_) => Some(UNAVAILABLE),
            _ => None, // a fault of the store is the next in the chain
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
