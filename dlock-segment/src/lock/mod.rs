//! The segmented lock: a lock for each segment of a hot resource, whose data the user
//! keeps.
//!
//! A pass over the segments ([`Segments`]) starts at a random one, by weight, and offers
//! each segment at most once: a free one if there is one; if all of them are busy, the
//! first that becomes free. A segment that was dry a moment ago is not offered, and neither
//! is one that another task finds dry while this one waits for it. So when all segments are
//! dry, most passes take no lock.
//!
//! A pass never waits while a guard that it gave out is still held: two such passes could
//! wait for each other.
//!
//! A task waits for two segments at first, and for twice as many after each [`WIDEN`]. So
//! many tasks that wait for short work stay cheap, and no task is stuck behind two slow
//! holders. All locks of the same key and client know which segments are dry.

mod dry_segments;
mod gather;
mod layout;
mod options;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dlock::{Dlock, Error, ErrorKind, Guard, IntoKey, Mutex, Operation, Result};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use rand::RngExt as _;
use tokio::time::Instant;

use self::dry_segments::{DrySegments, until};
pub use self::gather::SegmentShare;
pub use self::layout::Segment;
use self::layout::{Layout, SegmentSpec};
use self::options::{Options, Setting, with_options};
use crate::observe;

/// The largest number of segments of a lock or an inventory.
pub const MAX_SEGMENTS: u32 = 4096;

/// How many segments a task waits for at first.
const FIRST_WAITED_FOR: usize = 2;
/// How long a task waits before it waits for twice as many segments.
const WIDEN: Duration = Duration::from_millis(250);
/// How long a dry segment is remembered by default.
const DRY_FOR: Duration = Duration::from_secs(1);
/// The longest time that a dry segment is remembered: clocks cannot count for ever.
const DRY_FOR_AT_MOST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// A lock over a resource that is split into segments, such as the columns `stock_01`
/// to `stock_20` of a row.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
/// # let dlock = dlock::Dlock::connect("memory://").await?;
/// # let sku = 7;
/// # async fn take_one(column: usize, token: dlock::Token) -> Option<u64> { Some(1) }
/// use dlock::key;
/// use dlock_segment::SegmentedLock;
///
/// let stock = SegmentedLock::new(&dlock, key!("stock:{sku}"), 20);
/// let mut segments = stock.pick(); // random start, then each of the others once
/// while let Some((segment, guard)) = segments.next().await? {
///     if let Some(row) = take_one(segment.index(), guard.token()).await {
///         println!("got {row}");
///         break;
///     }
///     segments.dry(); // remembered for a while: nobody of this client tries it meanwhile
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "nothing is locked until a segment is picked"]
pub struct SegmentedLock {
    dlock: Dlock,
    layout: Result<Arc<Layout>>,
    options: Options,
}

/// The outcome of the work on one segment. From a function under `#[segmented_lock]` it
/// is the outcome on all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the segment may be dry"]
pub enum SegmentOutcome<T> {
    /// The work is done; no other segment is tried.
    Done(T),
    /// This segment had nothing left; the next one is tried.
    Dry,
}

impl<T> SegmentOutcome<T> {
    /// The value, if the work is done: `buy(sku).await?.done().ok_or(SoldOut)`.
    pub fn done(self) -> Option<T> {
        match self {
            SegmentOutcome::Done(value) => Some(value),
            SegmentOutcome::Dry => None,
        }
    }
}

impl SegmentedLock {
    /// A lock with this number of equal segments. An invalid key or number is reported by
    /// [`Segments::next`].
    pub fn new(dlock: &Dlock, key: impl IntoKey, segments: u32) -> Self {
        let specs = (0..segments.min(MAX_SEGMENTS + 1))
            .map(|_| SegmentSpec { name: None, weight: 1 })
            .collect();
        Self::with_specs(dlock, key, specs)
    }

    /// A lock whose segments have names, and weights that say how often each one comes
    /// first.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::SegmentedLock;
    ///
    /// let stock = SegmentedLock::named(&dlock, "stock:7", [("eu", 600), ("us", 400)]).prefer("eu");
    /// let first = stock.pick().next().await?.map(|(segment, _)| segment.index());
    /// assert_eq!(first, Some(0));
    /// # Ok(()) }
    /// ```
    pub fn named<N: Into<String>>(
        dlock: &Dlock,
        key: impl IntoKey,
        segments: impl IntoIterator<Item = (N, u32)>,
    ) -> Self {
        let most = MAX_SEGMENTS as usize + 1;
        let spec =
            |(name, weight): (N, u32)| SegmentSpec { name: Some(name.into().into()), weight };
        let specs = segments.into_iter().take(most).map(spec).collect();
        Self::with_specs(dlock, key, specs)
    }

    fn with_specs(dlock: &Dlock, key: impl IntoKey, specs: Vec<SegmentSpec>) -> Self {
        let layout = key.into_key().and_then(|key| Layout::new(key, specs)).map(Arc::new);
        let options = Options {
            settings: Vec::new(),
            max_hold: None,
            name: None,
            tags: Vec::new(),
            dry_for: DRY_FOR,
            preferred: None,
        };
        SegmentedLock { dlock: dlock.clone(), layout, options }
    }

    /// How long the lock of a segment outlives its process.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.set(Setting::Ttl(ttl))
    }

    /// How long [`Segments::next`] waits if every remaining segment is busy. With zero
    /// it does not wait.
    pub fn wait(self, wait: Duration) -> Self {
        self.set(Setting::Wait(Some(wait)))
    }

    /// [`Segments::next`] waits for a busy segment without limit.
    pub fn wait_unlimited(self) -> Self {
        self.set(Setting::Wait(None))
    }

    fn set(mut self, setting: Setting) -> Self {
        self.options.settings.push(setting);
        self
    }

    /// The guard of a segment is lost after this time, however long its work takes.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.options.max_hold = Some(max_hold);
        self
    }

    /// Takes ttl and wait from the client's configuration, as far as that has a
    /// policy of this name: `policy.payments.ttl`, `policy.payments.wait`. As for
    /// [`Lock`](dlock::Lock), it overrides what was said before it, and not what is said
    /// after it.
    pub fn policy(self, name: impl Into<String>) -> Self {
        self.set(Setting::Policy(name.into().into()))
    }

    /// The name under which logs, errors and metrics show the lock, instead of the
    /// template of the key.
    pub fn name(mut self, name: &'static str) -> Self {
        self.options.name = Some(name);
        self
    }

    /// Adds a tag that operators see with the holder. Do not put secrets in it.
    pub fn tag(mut self, name: impl Into<String>, value: impl ToString) -> Self {
        self.options.tags.push((name.into(), value.to_string()));
        self
    }

    /// Sets for how long a dry segment is not tried again, at most; 1 s by default. With
    /// zero it is not remembered. So a restock is seen after this time at the latest, or
    /// at once after [`restocked`](Self::restocked).
    ///
    /// *Dry* means that nothing is left. A body that wants more units than a segment has
    /// must not say `Dry`, because somebody else may want fewer: use
    /// [`gather`](Self::gather).
    pub fn dry_for(mut self, duration: Duration) -> Self {
        self.options.dry_for = duration;
        self
    }

    /// Forgets which segments of the key are dry, for all locks of this client. Call it
    /// after stock was added. Other processes see the stock after their
    /// [`dry_for`](Self::dry_for) at the latest.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::SegmentedLock;
    ///
    /// let stock = SegmentedLock::new(&dlock, "stock:7", 1);
    /// let mut segments = stock.pick();
    /// assert!(segments.next().await?.is_some());
    /// segments.dry();
    /// assert!(stock.pick().next().await?.is_none()); // known to be dry: no lock is taken
    /// stock.restocked();
    /// assert!(stock.pick().next().await?.is_some());
    /// # Ok(()) }
    /// ```
    pub fn restocked(&self) {
        if let Ok(layout) = &self.layout {
            self.dlock.extension::<DrySegments>().restocked(&layout.key);
        }
    }

    /// Tries the segment of this name or number first, unless it is known to be dry, or is
    /// busy while another one is free. If there is no such segment, [`Segments::next`]
    /// fails with `Invalid`.
    pub fn prefer(mut self, segment: impl ToString) -> Self {
        self.options.preferred = Some(segment.to_string());
        self
    }

    /// Starts a pass over the segments. [`Segments::next`] locks the first one.
    pub fn pick(&self) -> Segments {
        let dry = self.dlock.extension::<DrySegments>();
        let restocks = dry.restocks();
        let left = match &self.layout {
            Ok(layout) => {
                let known = dry.of(&layout.key, Instant::now());
                layout.order(self.options.preferred.as_deref()).map(|mut order| {
                    order.retain(|index| known.binary_search(index).is_err());
                    order
                })
            }
            Err(error) => Err(error.clone()),
        };
        Segments { lock: self.clone(), dry, restocks, left, current: None, offered: Vec::new() }
    }

    /// Runs the body under the lock of a segment, and again on the next segment while it
    /// returns [`SegmentOutcome::Dry`]. Returns `None` if every segment is dry, or was a
    /// moment ago ([`dry_for`](Self::dry_for)).
    ///
    /// If the lock is lost, the body stops at its next await. Inside the body the same key
    /// can be locked again.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::{SegmentedLock, SegmentOutcome};
    ///
    /// let stock = SegmentedLock::new(&dlock, "stock:7", 4);
    /// let taken = tokio::spawn(async move {
    ///     stock
    ///         .run(|segment, _guard| async move {
    ///             let has_stock = segment.index() == 2;
    ///             Ok::<_, dlock::Error>(if has_stock { SegmentOutcome::Done("a phone") } else { SegmentOutcome::Dry })
    ///         })
    ///         .await
    /// });
    /// assert_eq!(taken.await.expect("no panic")?, Some("a phone"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The error of the body, or that of [`Segments::next`]. `Lost` if the lock was lost
    /// while the body ran.
    ///
    /// # Cancel safety
    /// If it is dropped, the body is dropped at its await and the lock is released.
    pub async fn run<T, E, F, B>(&self, mut body: F) -> Result<Option<T>, E>
    where
        F: FnMut(Segment, Arc<Guard>) -> B,
        B: Future<Output = Result<SegmentOutcome<T>, E>>,
        E: From<Error>,
    {
        let mut segments = self.pick();
        while let Some((segment, guard)) = segments.next().await? {
            let guard = Arc::new(guard);
            match guard.run(body(segment, guard.clone())).await?? {
                SegmentOutcome::Done(value) => return Ok(Some(value)),
                SegmentOutcome::Dry => segments.dry(),
            }
        }
        Ok(None)
    }
}

impl fmt::Debug for SegmentedLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("SegmentedLock");
        match &self.layout {
            Ok(layout) => shown.field("key", &layout.key).field("segments", &layout.segments.len()),
            Err(error) => shown.field("error", error),
        };
        shown.finish()
    }
}

/// A pass over the segments of a [`SegmentedLock`]. It offers each segment at most once.
pub struct Segments {
    lock: SegmentedLock,
    dry: Arc<DrySegments>,
    /// The number of restocks when the current segment was offered.
    restocks: u64,
    /// The segments still to be offered, in this order.
    left: Result<Vec<usize>>,
    current: Option<usize>,
    /// The segments offered so far, with the tokens of their guards.
    offered: Vec<(usize, u64)>,
}

impl Segments {
    /// Locks the next segment: a free one if there is one, else the first that becomes
    /// free. Returns `None` if every segment was offered, or was dry a moment ago.
    ///
    /// Drop the guard of the last segment first. While it is held this does not wait,
    /// because two tasks could wait for each other. To hold several segments, use
    /// [`SegmentedLock::gather`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::SegmentedLock;
    ///
    /// let mut segments = SegmentedLock::new(&dlock, "stock:7", 2).pick();
    /// while let Some((segment, guard)) = segments.next().await? {
    ///     println!("segment {} under token {}", segment.index(), guard.token());
    ///     segments.dry();
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `TimedOut` if every remaining segment stayed busy for the whole wait.
    /// `WouldDeadlock` if every remaining segment is busy while a guard of this pass is
    /// still held. Else as [`Lock::lock`](dlock::Lock::lock).
    ///
    /// # Cancel safety
    /// If it is dropped, it leaves no lock and no place in a queue, and the pass stays as
    /// it was.
    pub async fn next(&mut self) -> Result<Option<(Segment, Guard)>> {
        let layout = self.lock.layout.clone()?;
        self.current = None;
        loop {
            self.restocks = self.dry.restocks();
            let known = self.dry.of(&layout.key, Instant::now());
            let left = self.left.as_mut().map_err(|error| error.clone())?;
            left.retain(|index| known.binary_search(index).is_err());
            if left.is_empty() {
                return Ok(None);
            }
            let (index, guard) = self.lock_one(&layout).await?;
            // Somebody may have found it dry while this task waited for it.
            if self.dry.is_dry(&layout.key, index, Instant::now()) {
                continue;
            }
            if let Ok(left) = &mut self.left {
                left.retain(|&left| left != index);
            }
            self.current = Some(index);
            self.offered.push((index, guard.token().get()));
            return Ok(Some((layout.segments[index].clone(), guard)));
        }
    }

    /// Locks the first of the segments left that is free.
    async fn lock_one(&self, layout: &Layout) -> Result<(usize, Guard)> {
        let left = self.left.as_deref().map_err(|error| error.clone())?;
        for &index in left {
            if let Some(guard) = self.lock.mutex(layout, index).try_lock().await? {
                return Ok((index, guard));
            }
        }
        if self.holds_a_guard(layout) {
            return Err(Error::new(ErrorKind::WouldDeadlock, Operation::Acquire)
                .with_key(&layout.key)
                .with_message(
                    "every segment left is busy, and a guard of this pass is still held, so two tasks could wait for each other; drop the guard before next(), or use gather()",
                ));
        }
        self.lock.first_free(layout, left).await
    }

    /// Whether a guard that this pass gave out is still held.
    fn holds_a_guard(&self, layout: &Layout) -> bool {
        if self.offered.is_empty() {
            return false;
        }
        self.lock.dlock.local_state().held.iter().any(|held| {
            let is_held = |(index, token): &(usize, u64)| {
                held.token == Some(*token) && held.key == layout.locks[*index]
            };
            self.offered.iter().any(is_held)
        })
    }

    /// Remembers for a while that the last offered segment was dry, so that no lock of
    /// this client and key tries it; see [`SegmentedLock::dry_for`].
    pub fn dry(&mut self) {
        if let (Some(index), Ok(layout)) = (self.current.take(), &self.lock.layout) {
            self.lock.mark_dry(&self.dry, layout, index, self.restocks);
        }
    }
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segments")
            .field("left", &self.left.as_ref().map_or(0, Vec::len))
            .finish_non_exhaustive()
    }
}

impl SegmentedLock {
    fn mutex(&self, layout: &Layout, index: usize) -> Mutex {
        with_options!(self.dlock.mutex(&layout.locks[index]), self.options)
    }

    /// Remembers that a segment is dry, unless there was a restock meanwhile.
    fn mark_dry(&self, dry: &DrySegments, layout: &Layout, index: usize, restocks: u64) {
        let until = until(Instant::now(), self.options.dry_for.min(DRY_FOR_AT_MOST));
        dry.remember(&layout.key, index, until, restocks);
        observe::dry(&layout.key, self.options.name, &layout.segments[index]);
    }

    /// Waits for the first of these to become free.
    async fn first_free(&self, layout: &Layout, busy: &[usize]) -> Result<(usize, Guard)> {
        let mut left = busy.to_vec();
        for at in (1..left.len()).rev() {
            left.swap(at, rand::rng().random_range(0..=at));
        }
        let mut waits = FuturesUnordered::new();
        let mut more = FIRST_WAITED_FOR;
        loop {
            for index in left.split_off(left.len().saturating_sub(more)) {
                let mutex = self.mutex(layout, index);
                waits.push(async move { mutex.lock().await.map(|guard| (index, guard)) });
            }
            let widen = async {
                match left.is_empty() {
                    true => std::future::pending().await,
                    false => tokio::time::sleep(WIDEN).await,
                }
            };
            tokio::select! {
                biased;
                // If one timed out or failed, so would the others.
                Some(locked) = waits.next() => return locked,
                () = widen => more = waits.len(),
            }
        }
    }
}
