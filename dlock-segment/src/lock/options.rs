//! The options of a segmented lock, which are set on the locks of its segments.

use std::time::Duration;

/// The options of a segmented lock.
#[derive(Clone)]
pub(super) struct Options {
    /// The settings in the order in which they were given: a policy overrides those
    /// before it.
    pub(super) settings: Vec<Setting>,
    pub(super) max_hold: Option<Duration>,
    pub(super) name: Option<&'static str>,
    pub(super) tags: Vec<(String, String)>,
    pub(super) dry_for: Duration,
    pub(super) preferred: Option<String>,
}

/// An option that a policy has too.
#[derive(Clone)]
pub(super) enum Setting {
    Ttl(Duration),
    /// `None`: without limit.
    Wait(Option<Duration>),
    Policy(Box<str>),
}

/// Sets the options on a `Mutex` or a `MultiLock`.
macro_rules! with_options {
    ($lock:expr, $options:expr) => {{
        let Options { settings, max_hold, name, tags, .. } = &$options;
        let mut lock = $lock;
        for setting in settings {
            lock = match setting {
                Setting::Ttl(ttl) => lock.ttl(*ttl),
                Setting::Wait(Some(wait)) => lock.wait(*wait),
                Setting::Wait(None) => lock.wait_unlimited(),
                Setting::Policy(name) => lock.policy(name),
            };
        }
        if let Some(max_hold) = max_hold {
            lock = lock.max_hold(*max_hold);
        }
        if let Some(name) = name {
            lock = lock.name(name);
        }
        tags.iter().fold(lock, |lock, (name, value)| lock.tag(name, value))
    }};
}
pub(super) use with_options;
