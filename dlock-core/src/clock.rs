//! Clocks. The machine gets a [`Moment`] as an argument and never reads a clock.

use std::fmt;
use std::ops::{Add, Sub};
use std::time::Duration;

/// A point on a process's own clock, in nanoseconds since an arbitrary start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(u64);

impl Moment {
    /// Later than every moment that a clock shows.
    pub const NEVER: Moment = Moment(u64::MAX);

    /// Now, by the clock of a client whose backend is reached through a network. It also
    /// counts the time that the machine was suspended.
    pub fn now() -> Self {
        Clock::boot().now()
    }

    /// The moment `nanos` after the start of the clock.
    pub const fn from_nanos(nanos: u64) -> Self {
        Moment(nanos)
    }

    /// Nanoseconds since the start of the clock.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Whole microseconds since the start of the clock.
    pub const fn as_micros(self) -> u64 {
        self.0 / 1_000
    }

    /// The time from `earlier` to this moment; zero if `earlier` is later.
    pub fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

pub(crate) fn nanos(duration: Duration) -> u64 {
    duration.as_secs().saturating_mul(1_000_000_000).saturating_add(duration.subsec_nanos().into())
}

impl Add<Duration> for Moment {
    type Output = Moment;
    fn add(self, duration: Duration) -> Moment {
        Moment(self.0.saturating_add(nanos(duration)))
    }
}

impl Sub<Duration> for Moment {
    type Output = Moment;
    fn sub(self, duration: Duration) -> Moment {
        Moment(self.0.saturating_sub(nanos(duration)))
    }
}

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Moment::NEVER => f.write_str("never"),
            Moment(nanos) => write!(f, "{:?}", Duration::from_nanos(nanos)),
        }
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
const SYSTEM_CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
/// Other systems have only the monotonic clock, which may stop while suspended.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const SYSTEM_CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;

/// The clock that a client reads.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Clock {
    /// The system's clock, which counts the time that the machine was suspended: a
    /// laptop that slept past a deadline has lost its lock when it wakes up.
    Boot,
    /// Tokio's clock, which a test can pause.
    Tokio(tokio::time::Instant),
    /// [`Clock::Boot`], and how many nanoseconds the machine seems to have been suspended.
    #[cfg(test)]
    Suspended(&'static std::sync::atomic::AtomicU64),
}

/// For how long a task sleeps before it looks at [`Clock::Boot`] again: tokio's sleeps stand
/// still while the machine is suspended, and deadlines do not.
const LONGEST_SLEEP: Duration = Duration::from_millis(900);

impl Clock {
    pub(crate) fn boot() -> Self {
        Clock::Boot
    }

    pub(crate) fn tokio() -> Self {
        // The whole process shares one start, so that the moments of several clients
        // of one store can be compared. The start is read from the real clock, since
        // a paused clock may be far ahead; and it is a day ago, since a paused clock
        // may also be behind by the time that its test took so far.
        static START: std::sync::OnceLock<tokio::time::Instant> = std::sync::OnceLock::new();
        Clock::Tokio(*START.get_or_init(|| {
            let now = std::time::Instant::now();
            now.checked_sub(Duration::from_secs(24 * 60 * 60)).unwrap_or(now).into()
        }))
    }

    /// The time to sleep until a moment, or until it is time to look at the clock again.
    pub(crate) fn sleep_until(self, moment: Moment) -> Duration {
        let left = moment.since(self.now());
        match self {
            Clock::Tokio(_) => left,
            _ => left.min(LONGEST_SLEEP),
        }
    }

    pub(crate) fn now(self) -> Moment {
        match self {
            #[cfg(test)]
            Clock::Suspended(time) => {
                let time = time.load(std::sync::atomic::Ordering::Acquire);
                Clock::Boot.now() + Duration::from_nanos(time)
            }
            Clock::Boot => {
                let time = rustix::time::clock_gettime(SYSTEM_CLOCK);
                let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
                let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
                Moment(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
            }
            Clock::Tokio(start) => {
                Moment(nanos(tokio::time::Instant::now().saturating_duration_since(start)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_was_paused_before_the_first_client_moves() {
        std::thread::sleep(Duration::from_millis(5));
        let clock = Clock::tokio();
        let before = clock.now();
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(clock.now().since(before), Duration::from_millis(1));
    }
}
