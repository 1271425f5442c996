//! The clock of a process or of a server, which runs a little faster or slower than the
//! simulated time.

use std::time::Duration;

use dlock::backend::Moment;

#[derive(Clone, Copy)]
pub(super) struct DriftingClock {
    pub(super) per_mille: i64,
    pub(super) offset: Duration,
}

impl DriftingClock {
    pub(super) fn at(self, now: Duration) -> Moment {
        let nanos = i128::try_from(now.as_nanos()).unwrap_or(0);
        let local = nanos + nanos * i128::from(self.per_mille) / 1_000;
        Moment::from_nanos(u64::try_from(local).unwrap_or(0)) + self.offset
    }

    /// The earliest simulated time at which the clock shows this.
    pub(super) fn when(self, shows: Moment) -> Duration {
        let local = i128::from((shows - self.offset).as_nanos());
        let nanos = local * 1_000 / i128::from(1_000 + self.per_mille) + 1;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}
