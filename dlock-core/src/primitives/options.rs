//! The options that every lock has, whatever primitive it belongs to.

use std::sync::Arc;
use std::time::Duration;

use crate::claim::Holder;
use crate::client::Handle;
use crate::clock::Moment;
use crate::config::{MAX_TTL, MIN_TTL, Policy};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// The highest number of tags of a lock.
const MAX_TAGS: usize = 16;
/// The longest name and the longest value of a tag.
const MAX_TAG_BYTES: usize = 256;

/// The options of one lock, with the client's configuration as defaults.
#[derive(Clone)]
pub(super) struct Options {
    pub(super) ttl: Duration,
    /// How long `lock()` waits; `None` is without limit.
    pub(super) wait: Option<Duration>,
    pub(super) max_hold: Option<Duration>,
    pub(super) hold_at_least: Option<Duration>,
    pub(super) fair: bool,
    tags: Vec<(String, String)>,
}

/// Writes the methods that set the options, for a type with the fields `handle` and
/// `options`.
macro_rules! lock_options {
    () => {
        /// Sets how long the lock outlives its process. The lock is renewed every
        /// third of this time, so it limits the recovery after a crash, not the work.
        pub fn ttl(mut self, ttl: Duration) -> Self {
            self.options.set_ttl(ttl);
            self
        }

        /// Sets how long `lock()` waits. With zero it tries once.
        pub fn wait(mut self, wait: Duration) -> Self {
            self.options.set_wait(Some(wait));
            self
        }

        /// Lets `lock()` wait without limit.
        pub fn wait_unlimited(mut self) -> Self {
            self.options.set_wait(None);
            self
        }

        /// Sets how long the guard may be held: after that it is lost, even if its
        /// work goes on.
        pub fn max_hold(mut self, max_hold: Duration) -> Self {
            self.options.set_max_hold(max_hold);
            self
        }

        /// Keeps the key taken, on all machines, for this long after it was acquired,
        /// even if the guard is released or dropped earlier: for jobs that must not
        /// run again too soon. It needs an exclusive lock or permits and takes at most
        /// [a day](crate::MAX_TTL). A nested guard follows the outermost guard of its
        /// key; a guard that is downgraded keeps nothing taken. Of several keys it counts
        /// from when all of them are held.
        pub fn hold_at_least(mut self, duration: Duration) -> Self {
            self.options.set_hold_at_least(duration);
            self
        }

        /// Takes ttl and wait from the policy of this name in the client's
        /// configuration, if it has them: `policy.payments.ttl`,
        /// `policy.payments.wait`. It overrides options that were set before this
        /// call; options that are set after it override the policy.
        pub fn policy(mut self, name: &str) -> Self {
            self.options.apply(self.handle.config.policy(name));
            self
        }

        /// Serves requests first come, first served over all processes, without
        /// hand-over inside this one. It is slower when many wait.
        pub fn fair(mut self) -> Self {
            self.options.set_fair();
            self
        }

        /// Adds a tag that operators see with the holder. Do not put secrets in it.
        pub fn tag(mut self, name: impl Into<String>, value: impl ToString) -> Self {
            self.options.add_tag(name.into(), value.to_string());
            self
        }
    };
}
pub(super) use lock_options;

impl Options {
    pub(super) fn new(handle: &Handle) -> Self {
        Options {
            ttl: handle.config.ttl,
            wait: handle.config.wait,
            max_hold: None,
            hold_at_least: None,
            fair: false,
            tags: Vec::new(),
        }
    }

    pub(super) fn set_ttl(&mut self, ttl: Duration) {
        self.ttl = ttl;
    }
    pub(super) fn set_wait(&mut self, wait: Option<Duration>) {
        self.wait = wait;
    }
    pub(super) fn set_max_hold(&mut self, max_hold: Duration) {
        self.max_hold = Some(max_hold);
    }
    pub(super) fn set_hold_at_least(&mut self, duration: Duration) {
        self.hold_at_least = Some(duration).filter(|duration| !duration.is_zero());
    }
    pub(super) fn apply(&mut self, policy: Policy) {
        self.ttl = policy.ttl.unwrap_or(self.ttl);
        self.wait = policy.wait.unwrap_or(self.wait);
    }
    pub(super) fn set_fair(&mut self) {
        self.fair = true;
    }
    pub(super) fn add_tag(&mut self, name: String, value: String) {
        self.tags.push((name, value));
    }

    pub(super) fn tries_once(&self) -> bool {
        self.wait == Some(Duration::ZERO)
    }

    /// The end of a wait that starts now.
    pub(super) fn wait_end(&self, now: Moment) -> Moment {
        self.wait.map_or(Moment::NEVER, |wait| now + wait)
    }

    /// Checks that every option is within its bounds.
    pub(super) fn check(&self, key: &Key) -> Result<()> {
        let fault = |what: &str| {
            Err(Error::new(ErrorKind::Invalid, Operation::Acquire).with_key(key).with_message(what))
        };
        if self.ttl < MIN_TTL {
            return fault("the ttl is below a millisecond; set it to some seconds");
        }
        if self.ttl > MAX_TTL {
            return fault(
                "the ttl is above a day; a lock is renewed while it is held, so a short ttl is enough",
            );
        }
        if self.max_hold.is_some_and(|hold| hold.is_zero()) {
            return fault("max_hold is zero; remove it to hold the lock without limit");
        }
        let fits =
            |part: &String| part.len() <= MAX_TAG_BYTES && !part.chars().any(char::is_control);
        if self.tags.len() > MAX_TAGS
            || !self.tags.iter().all(|(name, value)| fits(name) && fits(value))
        {
            return fault(&format!(
                "a tag is not valid; use at most {MAX_TAGS} tags of at most {MAX_TAG_BYTES} bytes, without control characters"
            ));
        }
        Ok(())
    }

    /// The client as a holder with the tags of this lock.
    pub(super) fn holder(&self, client: &Arc<Holder>) -> Arc<Holder> {
        if self.tags.is_empty() {
            return client.clone();
        }
        Arc::new(Holder { tags: self.tags.clone(), ..Holder::clone(client) })
    }
}
