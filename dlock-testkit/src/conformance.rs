//! The conformance suite of a backend: one trial for each promise.
//!
//! The backend's [`Capabilities`] decide which trials are run; the suite prints the
//! names of the others. To run it on a backend of your own:
//!
//! ```
//! use dlock::backend::memory::Memory;
//! use dlock_testkit::conformance::Suite;
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
//! let store = Memory::new();
//! let suite = Suite::new(move || store.another()); // one value for each client
//! suite.run().await; // panics at the first broken promise, naming it
//! # }
//! ```
//!
//! Every trial uses its own keys, so the suite can run on a shared server.

mod cancel;
mod exclusion;
mod loss;
mod operators;
mod waiting;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dlock::backend::{Backend, Capabilities, Cursor};
use dlock::{Dlock, DlockBuilder};

use crate::faulty_backend::{FaultControl, FaultyBackend};
use crate::proxy::Proxy;

/// The conformance suite for one backend.
pub struct Suite {
    backend: Box<dyn Fn() -> Box<dyn Backend>>,
    /// A backend whose way to the store can be cut, for stores with sessions.
    behind_link: Option<Box<MakeLinked>>,
    keys: AtomicU64,
}

type MakeLinked = dyn Fn() -> (Box<dyn Backend>, Link);

/// Cuts the way to a store (`true`), or restores it.
pub type Link = Box<dyn Fn(bool) + Send + Sync>;

type Running<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// A test of one promise of a backend.
pub struct Trial {
    /// The name of the promise.
    pub name: &'static str,
    /// Whether the promise applies to a backend with these capabilities.
    pub applies: fn(&Capabilities) -> bool,
    /// Runs the trial; it panics if the promise is broken.
    pub run: for<'a> fn(&'a Suite) -> Running<'a>,
}

impl std::fmt::Debug for Trial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl std::fmt::Debug for Suite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Suite")
    }
}

/// Lists trials as `module::name if capability`.
macro_rules! trials {
    ($($module:ident::$name:ident $(if $need:ident)*;)*) => {
        /// All trials of the suite.
        pub fn trials() -> Vec<Trial> {
            vec![$(Trial {
                name: stringify!($name),
                applies: |_capabilities| true $(&& _capabilities.$need)*,
                run: |suite| Box::pin($module::$name(suite)),
            }),*]
        }
    };
}

impl Suite {
    /// A suite for a store. Each call of `backend` returns a backend on that store, for
    /// one client.
    pub fn new<B: Backend>(backend: impl Fn() -> B + 'static) -> Self {
        let backend = move || Box::new(backend()) as Box<dyn Backend>;
        Suite { backend: Box::new(backend), behind_link: None, keys: AtomicU64::new(0) }
    }

    /// Says how to make a backend whose way to the store can be cut. A store whose locks
    /// live by a session needs it: a client that is cut off must lose its session too.
    #[must_use]
    pub fn with_link<B: Backend>(mut self, make: impl Fn() -> (B, Link) + 'static) -> Self {
        self.behind_link = Some(Box::new(move || {
            let (backend, link) = make();
            (Box::new(backend), link)
        }));
        self
    }

    /// The same with a proxy in front of the server at this port; `backend` makes a backend
    /// of what is at a port.
    #[must_use]
    pub fn with_proxy<B: Backend>(self, port: u16, backend: impl Fn(u16) -> B + 'static) -> Self {
        self.with_link(move || {
            let proxy = Proxy::opaque(port);
            let backend = backend(proxy.port());
            let link = move |is_cut: bool| if is_cut { proxy.go_silent() } else { proxy.heal() };
            (backend, Box::new(link) as Link)
        })
    }

    /// The ttl of the trials.
    fn ttl(&self) -> Duration {
        self.nearest(TTL)
    }

    /// How much later than a lease a session may end at the store.
    fn expiry_slack(&self) -> Duration {
        let session = (self.backend)().capabilities().ttl.is_per_session();
        if session { self.ttl() } else { Duration::ZERO }
    }

    /// The ttl that the backend can honour and is nearest to this one.
    fn nearest(&self, ttl: Duration) -> Duration {
        (self.backend)().capabilities().ttl.nearest(ttl)
    }

    trials! {
        exclusion::one_holder_at_a_time;
        exclusion::try_lock_says_busy;
        exclusion::tokens_rise_over_clients;
        exclusion::readers_share_and_writers_exclude if shared;
        exclusion::late_readers_share if shared;
        exclusion::mixed_readers_and_writers if shared;
        exclusion::a_mutex_is_a_writer if shared;
        exclusion::downgrade_lets_readers_in if shared;
        exclusion::a_semaphore_has_a_capacity if permits;
        exclusion::a_semaphore_is_apart_from_a_lock if permits;
        exclusion::all_of_never_deadlocks;
        exclusion::all_of_releases_on_failure;
        exclusion::same_owner_same_grant;
        exclusion::a_release_never_touches_a_successor;
        exclusion::further_tokens_rise_and_are_remembered;
        exclusion::a_replaced_lease_is_freed_first;
        waiting::a_waiter_is_woken;
        waiting::a_timeout_names_the_holder;
        waiting::fair_is_first_come_first_served if fifo;
        waiting::writers_are_not_starved if shared if fifo;
        waiting::readers_are_not_starved if shared if fifo;
        waiting::many_permits_are_not_starved if permits if fifo;
        waiting::hand_over_stays_inside_the_process;
        waiting::waiters_are_bounded;
        waiting::a_zero_wait_tries_once;
        loss::renewed_for_as_long_as_held;
        loss::one_failed_renewal_is_survived;
        loss::one_failing_lease_does_not_stop_others;
        loss::a_cut_off_holder_loses_in_time;
        loss::permits_come_back_after_a_crash if permits;
        loss::dead_waiters_do_not_hold_up_the_queue if fifo;
        loss::lost_answers_leave_no_ghost;
        loss::run_stops_when_lost if operators;
        loss::max_hold_ends_a_hold;
        loss::release_after_keeps_the_key_taken if release_after;
        loss::shutdown_lets_nobody_overlap;
        cancel::dropped_at_any_poll;
        cancel::dropped_guards_release;
        cancel::a_panic_releases;
        operators::holders_and_waiters_are_shown;
        operators::keys_are_listed if operators;
        operators::broken_locks_are_told if operators;
        operators::only_the_holder_that_was_shown_is_broken if operators;
        operators::one_of_several_readers_is_broken if operators if shared;
        operators::a_lock_and_its_namesake_are_broken_apart if operators if permits;
        operators::a_key_that_is_kept_is_shown_as_kept if operators if release_after;
        operators::health_is_told;
        operators::nothing_is_left if operators;
    }

    /// Runs every trial that applies to the backend.
    ///
    /// # Panics
    /// If a promise is broken.
    pub async fn run(&self) {
        let capabilities = (self.backend)().capabilities();
        for trial in Self::trials() {
            if (trial.applies)(&capabilities) {
                println!("{}: {}", capabilities.name, trial.name);
                (trial.run)(self).await;
            } else {
                println!("{}: {} skipped, not a capability", capabilities.name, trial.name);
            }
        }
    }

    /// A key that no other trial uses.
    fn key(&self, name: &str) -> String {
        format!(
            "conformance:{}:{name}:{}",
            std::process::id(),
            self.keys.fetch_add(1, Ordering::Relaxed)
        )
    }

    fn client_of(&self, configure: impl FnOnce(DlockBuilder) -> DlockBuilder) -> Dlock {
        let builder = Dlock::builder().backend((self.backend)()).ttl(self.ttl()).wait(LONG_WAIT);
        configure(builder).connect_lazy().expect("a client")
    }

    /// A new client, as if in another process.
    fn client(&self) -> Dlock {
        self.client_of(|builder| builder)
    }

    /// A new client whose calls can be made to fail.
    fn faulty(&self) -> (Dlock, FaultControl) {
        let (backend, link) = match &self.behind_link {
            Some(make) => make(),
            None => ((self.backend)(), Box::new(|_| {}) as Link),
        };
        let (backend, faults) = FaultyBackend::new(backend);
        let faults = faults.with_link(link);
        let client = Dlock::builder().backend(backend).ttl(self.ttl()).wait(LONG_WAIT);
        (client.connect_lazy().expect("a client"), faults)
    }
}

/// The ttl of the trials, if the backend can honour it: long enough for a slow machine, and short enough to wait
/// for its end.
const TTL: Duration = Duration::from_millis(900);
/// Longer than anything takes that works.
const LONG_WAIT: Duration = Duration::from_secs(20);
/// The time that counts as immediate, on a busy machine.
const SOON: Duration = Duration::from_millis(400);

/// Waits until a condition is true.
///
/// # Panics
/// If it is not true after 20 s, which is far more than any test needs.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(LONG_WAIT, waiting).await.is_ok(), "waited in vain for: {what}");
}

async fn is_free(client: &Dlock, key: &str) -> bool {
    let state = client.inspect(key).await.expect("an inspection");
    state.holders.is_empty() && state.waiters.is_empty()
}

/// How many claims on a key wait, of a client that alone waits for it. A store that does not
/// know who waits is not asked.
async fn waiters(client: &Dlock, key: &str) -> usize {
    match client.capabilities().waiters {
        true => client.inspect(key).await.expect("an inspection").waiters.len(),
        false => client.local_state().waiting.len(),
    }
}

async fn keys_in_use(client: &Dlock, prefix: &str) -> Vec<String> {
    let mut keys = Vec::new();
    let mut cursor = Some(Cursor::default());
    while let Some(from) = cursor {
        let page = client.list(prefix, from).await.expect("a page");
        keys.extend(page.keys.iter().map(|key| key.as_str().to_owned()));
        cursor = page.next;
    }
    keys.sort();
    keys.dedup();
    keys
}

/// Waits for all tasks, and panics if one of them did.
async fn all(tasks: Vec<tokio::task::JoinHandle<()>>) {
    for task in tasks {
        if let Err(error) = task.await {
            std::panic::resume_unwind(error.into_panic());
        }
    }
}
