//! With what the command ends: `sysexits.h` where it has a word for it.

use dlock_core::ErrorKind;

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
  `dlock run` else ends as its program does: with its status, with 128 + n when
  signal n ended it, 126 or 127 when it cannot be run or found.";

/// The status that tells of this error.
pub(crate) fn of(error: &anyhow::Error) -> u8 {
    let Some(error) = error.chain().find_map(|it| it.downcast_ref::<dlock_core::Error>()) else {
        return FAILURE;
    };
    match error.kind() {
        kind if kind.is_busy() => BUSY,
        ErrorKind::Lost => LOST,
        ErrorKind::Unavailable | ErrorKind::Unknown => UNAVAILABLE,
        ErrorKind::Denied => DENIED,
        ErrorKind::Config => CONFIG,
        ErrorKind::Invalid | ErrorKind::Unsupported => USAGE,
        _ => FAILURE,
    }
}
