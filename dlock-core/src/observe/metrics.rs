//! The metrics of locks. Their names and labels are made once for each template, and
//! a program has only as many templates as its source: an event then costs no
//! allocation, and almost nothing if no recorder is installed.

use std::cell::RefCell;
use std::sync::OnceLock;

use hashbrown::HashMap;
use metrics::{Counter, Histogram, Label, Level, Metadata, with_recorder};
use parking_lot::Mutex;

use crate::collections::Map;
use crate::key::Key;
use crate::observe::Event;

/// The metrics of the locks of one template.
struct Series {
    label: Label,
    acquired: metrics::Key,
    handed_over: metrics::Key,
    waited: metrics::Key,
    wait: metrics::Key,
    hold: metrics::Key,
    renewed: metrics::Key,
    uncertain: metrics::Key,
    lost: metrics::Key,
}

impl Series {
    fn new(template: &'static str) -> Self {
        let shown = if template.is_empty() { "unnamed" } else { template };
        let label = Label::from_static_parts("lock", shown);
        let named = |name: &'static str| metrics::Key::from_parts(name, vec![label.clone()]);
        Series {
            acquired: named("dlock_acquired_total"),
            handed_over: named("dlock_handed_over_total"),
            waited: named("dlock_waited_total"),
            wait: named("dlock_wait_seconds"),
            hold: named("dlock_hold_seconds"),
            renewed: named("dlock_renewed_total"),
            uncertain: named("dlock_uncertain_total"),
            lost: named("dlock_lost_total"),
            label,
        }
    }

    fn of(key: &Key) -> &'static Series {
        thread_local! {
            /// The series that this thread has used, by the address of the template.
            static SEEN: RefCell<Map<u64, &'static Series>> = RefCell::default();
        }
        let template = key.template();
        let address = template.as_ptr().addr() as u64 ^ ((template.len() as u64) << 48);
        let find = |seen: &RefCell<Map<u64, _>>| {
            *seen.borrow_mut().entry(address).or_insert_with(|| Self::shared(template))
        };
        SEEN.try_with(find).unwrap_or_else(|_| Self::shared(template)) // the thread is ending
    }

    fn shared(template: &'static str) -> &'static Series {
        static ALL: OnceLock<Mutex<HashMap<&'static str, &'static Series>>> = OnceLock::new();
        let mut all = ALL.get_or_init(Mutex::default).lock();
        all.entry(template).or_insert_with(|| Box::leak(Box::new(Series::new(template))))
    }
}

static METADATA: Metadata<'static> =
    Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

fn counter(key: &metrics::Key) -> Counter {
    with_recorder(|recorder| recorder.register_counter(key, &METADATA))
}

fn histogram(key: &metrics::Key) -> Histogram {
    with_recorder(|recorder| recorder.register_histogram(key, &METADATA))
}

/// Records an event.
pub(crate) fn record(event: &Event<'_>) {
    match *event {
        Event::Acquired { key, waited, handed_over, .. } => {
            let series = Series::of(key);
            counter(&series.acquired).increment(1);
            if handed_over {
                counter(&series.handed_over).increment(1);
            }
            if !waited.is_zero() {
                counter(&series.waited).increment(1);
            }
            histogram(&series.wait).record(waited);
        }
        Event::Refused { key, error } => {
            let kind = Label::new("kind", format!("{:?}", error.kind()));
            let labels = vec![Series::of(key).label.clone(), kind];
            counter(&metrics::Key::from_parts("dlock_refused_total", labels)).increment(1);
        }
        Event::Released { key, held } => histogram(&Series::of(key).hold).record(held),
        Event::Renewed { key } => counter(&Series::of(key).renewed).increment(1),
        Event::Uncertain { key, .. } => counter(&Series::of(key).uncertain).increment(1),
        Event::Lost { key, .. } => counter(&Series::of(key).lost).increment(1),
    }
}
