//! Work on several segments at once: gathering units from them, and merging thin ones.
//!
//! # No deadlock
//! A task that holds a segment never waits for another one, with one exception: it locks
//! segments in the order of their keys. So whoever waits holds only keys that sort before
//! the one that it waits for, and no circle is possible, whatever the processes are.
//!
//! Gathering therefore has two rounds:
//! 1. It goes through the segments from a random start, takes each one that is free, and
//!    never waits. That is enough unless segments are busy or the stock is thin.
//! 2. If it found too little and some were busy, it releases everything, and locks one
//!    segment after the other in the order of the keys, within one wait, until it has
//!    enough.
//!
//! A segment that turns out to be empty is released at once and marked as dry. What is
//! counted was read under a lock that is still held, so it stays true until the body ends.

use std::sync::Arc;

use dlock::{Error, ErrorKind, Guard, MultiGuard, MultiLock, Operation, Result, Token};
use tokio::time::Instant;

use super::SegmentedLock;
use super::dry_segments::DrySegments;
use super::layout::{Layout, Segment};
use super::options::{Options, Setting, with_options};

/// What one segment gives or gets, for the body of [`SegmentedLock::gather`] or
/// [`SegmentedLock::merge`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SegmentShare {
    /// The segment.
    pub segment: Segment,
    /// The number of units, at least 1.
    pub units: u64,
    /// The fencing token of the segment's lock.
    pub token: Token,
}

/// The segments that a call holds, with the units that each one has.
struct Held {
    dry: Arc<DrySegments>,
    /// The number of restocks when the call began.
    restocks: u64,
    segments: Vec<(usize, u64, Guard)>,
}

impl SegmentedLock {
    /// Takes `want` units from as many segments as it needs, or nothing: 20 rows of 2
    /// units can serve 3.
    ///
    /// `available` tells how many units a segment has; it runs under the lock of that
    /// segment. When there are enough, `take` runs under the locks of all segments that
    /// give something. It gets their shares, whose units are `want` together, and must
    /// write all of them or none, for instance in one transaction. Returns `None` if all
    /// segments together have less than `want`.
    ///
    /// Two calls never wait for each other in a circle. Drop the guards that
    /// [`Segments::next`] returned before you call this, because their segments are busy for
    /// this call too. If a lock is lost, `take` stops at its next await.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::SegmentedLock;
    /// use std::sync::Mutex;
    ///
    /// let columns = Mutex::new([2u64; 20]);
    /// let stock = SegmentedLock::new(&dlock, "stock:7", 20);
    /// let taken = stock
    ///     .gather(
    ///         3,
    ///         async |segment| Ok::<_, dlock::Error>(columns.lock().unwrap()[segment.index()]),
    ///         async |shares| {
    ///             let mut columns = columns.lock().unwrap(); // or begin a transaction
    ///             for share in &shares {
    ///                 columns[share.segment.index()] -= share.units;
    ///             }
    ///             Ok(shares.len())
    ///         },
    ///     )
    ///     .await?;
    /// assert_eq!(taken, Some(2)); // from two segments
    /// assert_eq!(columns.lock().unwrap().iter().sum::<u64>(), 37);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The error of `available` or `take`. `Invalid` if `want` is 0. `TimedOut` if
    /// segments stayed busy, and the others did not have enough; the wait is for all of
    /// them together. `WouldDeadlock` if it is called inside the lock of a segment and had
    /// to wait for one whose key sorts before that. `Lost` if a lock was lost meanwhile.
    /// Else as [`Segments::next`].
    ///
    /// [`Segments::next`]: super::Segments::next
    ///
    /// # Cancel safety
    /// If it is dropped, `take` is dropped at its await and all locks are released.
    pub async fn gather<T, E, A, U, F, B>(
        &self,
        want: u64,
        mut available: A,
        take: F,
    ) -> Result<Option<T>, E>
    where
        A: FnMut(Segment) -> U,
        U: Future<Output = Result<u64, E>>,
        F: FnOnce(Vec<SegmentShare>) -> B,
        B: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let layout = self.layout.clone()?;
        if want == 0 {
            return Err(Error::new(ErrorKind::Invalid, Operation::Acquire)
                .with_key(&layout.key)
                .with_message("gather() was asked for 0 units; ask for at least 1")
                .into());
        }
        let Some(held) = self.gathered(&layout, want, &mut available).await? else {
            return Ok(None);
        };
        let mut shares = held.shares(&layout);
        let mut left = want;
        for share in &mut shares {
            share.units = share.units.min(left);
            left -= share.units;
        }
        held.guard(self, &layout).run(take(shares)).await?.map(Some)
    }

    /// Moves the units of thin segments into one of them, so that a body that works on a
    /// single segment can take more than a few units again.
    ///
    /// It looks at every segment that is free, and does not wait for busy ones. Those with
    /// 1 to `below - 1` units are thin. The body runs under the locks of all thin segments.
    /// It gets what each of them gives, and the share of the one that gets all of it; it
    /// must write everything or nothing. Then the empty ones count as dry. Returns `None`,
    /// without calling the body, if fewer than two thin segments were free.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::SegmentedLock;
    /// use std::sync::Mutex;
    ///
    /// let columns = Mutex::new([1u64, 0, 3, 50]);
    /// let stock = SegmentedLock::new(&dlock, "stock:7", 4);
    /// let moved = stock
    ///     .merge(
    ///         10,
    ///         async |segment| Ok::<_, dlock::Error>(columns.lock().unwrap()[segment.index()]),
    ///         async |from, into| {
    ///             let mut columns = columns.lock().unwrap(); // or begin a transaction
    ///             for share in &from {
    ///                 columns[share.segment.index()] -= share.units;
    ///             }
    ///             columns[into.segment.index()] += into.units;
    ///             Ok(into.units)
    ///         },
    ///     )
    ///     .await?;
    /// assert_eq!(moved, Some(1));
    /// assert_eq!(*columns.lock().unwrap(), [0, 0, 4, 50]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The error of `available` or of the body. `Lost` if a lock was lost meanwhile. Else
    /// as [`Segments::next`](super::Segments::next), but never `TimedOut`.
    ///
    /// # Cancel safety
    /// If it is dropped, the body is dropped at its await and all locks are released.
    pub async fn merge<T, E, A, U, F, B>(
        &self,
        below: u64,
        mut available: A,
        body: F,
    ) -> Result<Option<T>, E>
    where
        A: FnMut(Segment) -> U,
        U: Future<Output = Result<u64, E>>,
        F: FnOnce(Vec<SegmentShare>, SegmentShare) -> B,
        B: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let layout = self.layout.clone()?;
        let mut held = Held::new(self);
        for index in self.pick().left? {
            if let Some(guard) = self.mutex(&layout, index).try_lock().await? {
                let units = held.look(self, &layout, index, guard, &mut available).await?;
                if units >= below {
                    held.segments.pop();
                }
            }
        }
        // The one that has the most comes last.
        held.segments.sort_by_key(|(_, units, _)| *units);
        let mut from = held.shares(&layout);
        let Some(mut into) = from.pop().filter(|_| !from.is_empty()) else { return Ok(None) };
        into.units = from.iter().map(|share| share.units).sum();
        let emptied: Vec<usize> = from.iter().map(|share| share.segment.index()).collect();
        let (dry, restocks) = (held.dry.clone(), held.restocks);
        let value = held.guard(self, &layout).run(body(from, into)).await??;
        for index in emptied {
            self.mark_dry(&dry, &layout, index, restocks);
        }
        Ok(Some(value))
    }

    /// Locks segments that have `want` units together. Returns `None` if all of them have
    /// less.
    async fn gathered<E, A, U>(
        &self,
        layout: &Layout,
        want: u64,
        available: &mut A,
    ) -> Result<Option<Held>, E>
    where
        A: FnMut(Segment) -> U,
        U: Future<Output = Result<u64, E>>,
        E: From<Error>,
    {
        let left = self.pick().left?;
        let mut held = Held::new(self);
        let mut are_busy = false;
        for &index in &left {
            let Some(guard) = self.mutex(layout, index).try_lock().await? else {
                are_busy = true;
                continue;
            };
            held.look(self, layout, index, guard, available).await?;
            if held.units() >= want {
                return Ok(Some(held));
            }
        }
        // Everything is released before the first wait.
        drop(held);
        if !are_busy {
            return Ok(None);
        }
        let mut held = Held::new(self);
        let known = held.dry.of(&layout.key, Instant::now());
        let mut left: Vec<usize> =
            left.into_iter().filter(|index| known.binary_search(index).is_err()).collect();
        left.sort_by(|one, other| layout.locks[*one].cmp(&layout.locks[*other]));
        if left.is_empty() {
            return Ok(None);
        }
        let mut in_order = self.all_of(layout, &left).in_order()?;
        for index in left {
            let Some(guard) = in_order.next().await? else { break };
            debug_assert_eq!(*guard.key(), layout.locks[index], "both are in the order of keys");
            held.look(self, layout, index, guard, available).await?;
            if held.units() >= want {
                return Ok(Some(held));
            }
        }
        Ok(None)
    }

    /// The lock of several segments.
    fn all_of(&self, layout: &Layout, indices: &[usize]) -> MultiLock {
        let keys = indices.iter().map(|&index| &layout.locks[index]);
        with_options!(self.dlock.all_of(keys), self.options)
    }
}

impl Held {
    fn new(lock: &SegmentedLock) -> Self {
        let dry = lock.dlock.extension::<DrySegments>();
        let restocks = dry.restocks();
        Held { dry, restocks, segments: Vec::new() }
    }

    /// Asks how many units a locked segment has, and keeps the segment unless it is empty.
    async fn look<E, A, U>(
        &mut self,
        lock: &SegmentedLock,
        layout: &Layout,
        index: usize,
        guard: Guard,
        available: &mut A,
    ) -> Result<u64, E>
    where
        A: FnMut(Segment) -> U,
        U: Future<Output = Result<u64, E>>,
        E: From<Error>,
    {
        let units = guard.run(available(layout.segments[index].clone())).await??;
        match units {
            0 => lock.mark_dry(&self.dry, layout, index, self.restocks),
            _ => self.segments.push((index, units, guard)),
        }
        Ok(units)
    }

    /// The units of all segments held.
    fn units(&self) -> u64 {
        self.segments.iter().fold(0, |sum, (_, units, _)| sum.saturating_add(*units))
    }

    /// All that each segment has.
    fn shares(&self, layout: &Layout) -> Vec<SegmentShare> {
        let share = |(index, units, guard): &(usize, u64, Guard)| SegmentShare {
            segment: layout.segments[*index].clone(),
            units: *units,
            token: guard.token(),
        };
        self.segments.iter().map(share).collect()
    }

    /// One guard of all segments.
    fn guard(self, lock: &SegmentedLock, layout: &Layout) -> MultiGuard {
        let indices: Vec<usize> = self.segments.iter().map(|(index, ..)| *index).collect();
        let guards = self.segments.into_iter().map(|(.., guard)| guard).collect();
        lock.all_of(layout, &indices).held(guards)
    }
}
