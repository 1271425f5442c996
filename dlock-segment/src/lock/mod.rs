//! The segmented lock: a lock for each segment of something hot, whose data the
//! user keeps.
//!
//! A pass over the segments ([`Segments`]) starts at one drawn by weight and
//! offers each segment at most once:
//! 1. segments that are not known to be dry, those that are free first; when all
//!    that are left are busy, it waits for any of them;
//! 2. then, in the same way, those that were found dry a moment ago.
//!
//! Waiting starts with two segments and takes in twice as many at each
//! [`WIDEN`]: many tasks that wait for short work stay cheap, and a task is not
//! stuck behind two holders that take long. Which segments are dry is known to
//! all locks of the same key and client.

mod dry_segments;
mod layout;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dlock::{Dlock, Error, Guard, IntoKey, Mutex, Result};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use rand::RngExt as _;
use tokio::time::Instant;

use self::dry_segments::DrySegments;
pub use self::layout::Segment;
use self::layout::{Layout, SegmentSpec};

use crate::observe;

/// The most segments of a lock or a sale.
pub const MAX_SEGMENTS: u32 = 4096;

/// How many segments a task waits for at first, and how long until it waits for
/// more.
const FIRST_WAITED_FOR: usize = 2;
const WIDEN: Duration = Duration::from_millis(250);
/// For how long it is remembered that a segment was dry, unless set otherwise.
const DRY_FOR: Duration = Duration::from_secs(1);
/// What is longer is as good as for ever, and no clock can count it.
const DRY_FOR_AT_MOST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// A lock over something that is split in segments, such as the columns
/// `stock_01` to `stock_20` of a row.
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
///     segments.dry(); // remembered for a while and tried last
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

#[derive(Clone)]
struct Options {
    /// What was said, in this order: a policy overrides what comes before it.
    settings: Vec<Setting>,
    max_hold: Option<Duration>,
    name: Option<&'static str>,
    tags: Vec<(String, String)>,
    dry_for: Duration,
    preferred: Option<String>,
}

#[derive(Clone)]
enum Setting {
    Ttl(Duration),
    /// `None`: without limit.
    Wait(Option<Duration>),
    Policy(Box<str>),
}

/// What came of the work on one segment; from `#[segmented_lock]`, on all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it may be dry"]
pub enum SegmentOutcome<T> {
    /// It is done; no other segment is tried.
    Done(T),
    /// This segment had nothing; the next one is tried.
    Dry,
}

impl<T> SegmentOutcome<T> {
    /// The value, if it is done: `take(sku).await?.done().ok_or(SoldOut)`.
    pub fn done(self) -> Option<T> {
        match self {
            SegmentOutcome::Done(value) => Some(value),
            SegmentOutcome::Dry => None,
        }
    }
}

impl SegmentedLock {
    /// A lock of so many equal segments. What is wrong with the key or the number
    /// is told when a segment is picked.
    pub fn new(dlock: &Dlock, key: impl IntoKey, segments: u32) -> Self {
        let places = (0..segments.min(MAX_SEGMENTS + 1))
            .map(|_| SegmentSpec { name: None, weight: 1 })
            .collect();
        Self::with_specs(dlock, key, places)
    }

    /// A lock of segments with names and weights: how often each comes first.
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
        let place =
            |(name, weight): (N, u32)| SegmentSpec { name: Some(name.into().into()), weight };
        let places = segments.into_iter().take(most).map(place).collect();
        Self::with_specs(dlock, key, places)
    }

    fn with_specs(dlock: &Dlock, key: impl IntoKey, places: Vec<SegmentSpec>) -> Self {
        let layout = key.into_key().and_then(|key| Layout::new(key, places)).map(Arc::new);
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

    /// A guard is lost after this time, however long its work takes.
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

    /// The name under which logs, errors and metrics show the locks, instead of
    /// the key's template.
    pub fn name(mut self, name: &'static str) -> Self {
        self.options.name = Some(name);
        self
    }

    /// Something for operators to see beside the holder. Not for secrets.
    pub fn tag(mut self, name: impl Into<String>, value: impl ToString) -> Self {
        self.options.tags.push((name.into(), value.to_string()));
        self
    }

    /// For how long a dry segment is tried last. Zero: it is not remembered.
    pub fn dry_for(mut self, duration: Duration) -> Self {
        self.options.dry_for = duration;
        self
    }

    /// The segment of this name, or number, comes first, unless it is known to be
    /// dry or is busy while another is free. One that is not there is no
    /// preference.
    pub fn prefer(mut self, segment: impl ToString) -> Self {
        self.options.preferred = Some(segment.to_string());
        self
    }

    /// A pass over the segments. Nothing is locked before [`Segments::next`].
    pub fn pick(&self) -> Segments {
        let mut pass = Segments {
            lock: self.clone(),
            dry: Arc::default(),
            fresh: Vec::new(),
            stale: Vec::new(),
            current: None,
        };
        if let Ok(layout) = &self.layout {
            pass.dry = self.dlock.extension::<DrySegments>();
            let dry = pass.dry.of(&layout.key, Instant::now());
            let order = layout.order(self.options.preferred.as_deref());
            (pass.stale, pass.fresh) =
                order.into_iter().partition(|index| dry.binary_search(index).is_ok());
        }
        pass
    }

    /// Runs the body under the lock of a segment, and on the next one for as long
    /// as it says [`SegmentOutcome::Dry`]. `None`: every segment was dry.
    ///
    /// The body stops at its next await if the lock is lost; inside it, asking for
    /// the same key again goes through.
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
    /// What the body returns, and as [`Segments::next`]; `Lost` if the lock was
    /// lost under the body.
    ///
    /// # Cancel safety
    /// Dropping it drops the body at its await and releases the lock.
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

/// A pass over the segments of a [`SegmentedLock`]: each at most once.
pub struct Segments {
    lock: SegmentedLock,
    dry: Arc<DrySegments>,
    /// Still to be offered, in this order: first these, then the stale ones.
    fresh: Vec<usize>,
    /// Found dry a moment ago.
    stale: Vec<usize>,
    current: Option<usize>,
}

impl Segments {
    /// Locks the next segment: a free one if there is one, else the first that
    /// becomes free. `None`: each was offered.
    ///
    /// Let go of the guard before, or it is held on beside the next one.
    ///
    /// # Errors
    /// `TimedOut` if every segment left stayed busy for the wait; else as
    /// [`Lock::lock`](dlock::Lock::lock).
    ///
    /// # Cancel safety
    /// Dropping it leaves neither a lock nor a place in a queue, and the pass as
    /// it was.
    pub async fn next(&mut self) -> Result<Option<(Segment, Guard)>> {
        let layout = self.lock.layout.clone()?;
        self.current = None;
        let mut offered = Self::of(&self.lock, &layout, &self.fresh).await?;
        if offered.is_none() {
            offered = Self::of(&self.lock, &layout, &self.stale).await?;
        }
        Ok(offered.map(|(index, guard)| {
            self.fresh.retain(|&left| left != index);
            self.stale.retain(|&left| left != index);
            self.current = Some(index);
            (layout.segments[index].clone(), guard)
        }))
    }

    /// One of these, the first that is free.
    async fn of(
        lock: &SegmentedLock,
        layout: &Layout,
        indices: &[usize],
    ) -> Result<Option<(usize, Guard)>> {
        for &index in indices {
            if let Some(guard) = lock.mutex(layout, index).try_lock().await? {
                return Ok(Some((index, guard)));
            }
        }
        if indices.is_empty() {
            return Ok(None);
        }
        lock.first_free(layout, indices).await.map(Some)
    }

    /// The segment offered last had nothing: it is tried last for a while.
    pub fn dry(&mut self) {
        if let (Some(index), Ok(layout)) = (self.current.take(), &self.lock.layout) {
            let until = Instant::now() + self.lock.options.dry_for.min(DRY_FOR_AT_MOST);
            self.dry.remember(&layout.key, index, until);
            observe::dry(&layout.key, self.lock.options.name, &layout.segments[index]);
        }
    }
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segments")
            .field("left", &(self.fresh.len() + self.stale.len()))
            .finish_non_exhaustive()
    }
}

impl SegmentedLock {
    fn mutex(&self, layout: &Layout, index: usize) -> Mutex {
        let Options { settings, max_hold, name, tags, .. } = &self.options;
        let mut mutex = self.dlock.mutex(&layout.locks[index]);
        for setting in settings {
            mutex = match setting {
                Setting::Ttl(ttl) => mutex.ttl(*ttl),
                Setting::Wait(Some(wait)) => mutex.wait(*wait),
                Setting::Wait(None) => mutex.wait_unlimited(),
                Setting::Policy(name) => mutex.policy(name),
            };
        }
        if let Some(max_hold) = max_hold {
            mutex = mutex.max_hold(*max_hold);
        }
        if let Some(name) = name {
            mutex = mutex.name(name);
        }
        tags.iter().fold(mutex, |mutex, (name, value)| mutex.tag(name, value))
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
                // One that timed out or failed: so would the others.
                Some(locked) = waits.next() => return locked,
                () = widen => more = waits.len(),
            }
        }
    }
}
