//! The metrics of locks. Their names and labels are made once for each template, and
//! a program has only as many templates as its source: an event then costs no
//! allocation, and almost nothing if no recorder is installed.

use std::cell::RefCell;
use std::sync::OnceLock;

use hashbrown::HashMap;
use metrics::{Counter, Gauge, Histogram, Label, Level, Metadata, with_recorder};
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
    held: metrics::Key,
    waiting: metrics::Key,
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
            held: named("dlock_held"),
            waiting: named("dlock_waiting"),
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

fn gauge(key: &metrics::Key) -> Gauge {
    with_recorder(|recorder| recorder.register_gauge(key, &METADATA))
}

fn histogram(key: &metrics::Key) -> Histogram {
    with_recorder(|recorder| recorder.register_histogram(key, &METADATA))
}

/// A task that asks for a lock, in the gauge `dlock_waiting` until this is dropped: the
/// task may give up at any await.
pub(crate) struct Waiting(Gauge);

impl Waiting {
    pub(crate) fn new(key: &Key) -> Self {
        let gauge = gauge(&Series::of(key).waiting);
        gauge.increment(1);
        Waiting(gauge)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.decrement(1);
    }
}

/// Gives the recorder the help text of every metric, for each new client: the recorder
/// may have been installed after the last one.
pub(crate) fn describe() {
    use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

    describe_counter!("dlock_acquired_total", "Locks that were acquired.");
    describe_counter!(
        "dlock_waited_total",
        "Locks that were acquired after a wait, because somebody else had them."
    );
    describe_counter!(
        "dlock_handed_over_total",
        "Locks that were handed over by another task of the same process."
    );
    describe_counter!("dlock_refused_total", "Requests for a lock that ended with an error.");
    describe_counter!("dlock_renewed_total", "Leases that were renewed.");
    describe_counter!("dlock_uncertain_total", "Renewals that failed while the lock was held.");
    describe_counter!("dlock_lost_total", "Locks that were lost while they were held.");
    describe_gauge!("dlock_held", "Guards that exist now.");
    describe_gauge!("dlock_waiting", "Requests for a lock that are under way now.");
    describe_histogram!(
        "dlock_wait_seconds",
        Unit::Seconds,
        "Time from the request for a lock until it was acquired."
    );
    describe_histogram!(
        "dlock_hold_seconds",
        Unit::Seconds,
        "Time from the acquisition of a lock until it was released."
    );
}

/// Records an event.
pub(crate) fn record(event: &Event<'_>) {
    match *event {
        Event::Acquired { key, waited, queued, handed_over, .. } => {
            let series = Series::of(key);
            counter(&series.acquired).increment(1);
            gauge(&series.held).increment(1);
            if handed_over {
                counter(&series.handed_over).increment(1);
            }
            if queued {
                counter(&series.waited).increment(1);
            }
            histogram(&series.wait).record(waited);
        }
        Event::Refused { key, error } => {
            let kind = Label::new("kind", format!("{:?}", error.kind()));
            let labels = vec![Series::of(key).label.clone(), kind];
            counter(&metrics::Key::from_parts("dlock_refused_total", labels)).increment(1);
        }
        Event::Released { key, held } => {
            let series = Series::of(key);
            gauge(&series.held).decrement(1);
            histogram(&series.hold).record(held);
        }
        Event::Renewed { key } => counter(&Series::of(key).renewed).increment(1),
        Event::Uncertain { key, .. } => counter(&Series::of(key).uncertain).increment(1),
        Event::Lost { key, .. } => counter(&Series::of(key).lost).increment(1),
    }
}
