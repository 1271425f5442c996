//! Which transitions of the machine were taken, and how often. The simulation prints it
//! and fails when one is never reached. Outside the simulation it costs nothing.

macro_rules! transitions {
    ($($(#[$about:meta])* $name:ident,)*) => {
        /// A transition of the machine.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Transition { $($(#[$about])* $name,)* }

        impl Transition {
            /// All of them.
            pub const ALL: &[Transition] = &[$(Transition::$name,)*];
        }
    };
}

transitions! {
    /// A task is admitted to a lease that was just granted.
    Admit,
    /// A lease is handed over inside the process.
    HandOver,
    /// A reader joins readers that are inside.
    Join,
    /// A task is admitted inside a lock that its parent holds.
    AdmitNested,
    /// A task that does not wait hears that the lock is busy.
    RefuseBusy,
    /// A lease goes on in a gate of its own, since a reader may not join it.
    Retire,
    /// A lease that is handed over is to be prolonged, while hand-overs go on.
    Extend,
    /// A claim is made.
    Acquire,
    /// A claim is made that takes the place of a lease.
    AcquireInstead,
    /// A lease that nobody wants is released.
    Release,
    /// A lock is granted by a notice.
    GrantedByNotice,
    /// A grant comes too late to be of use.
    GrantTooLate,
    /// A grant is void, since the lock was taken away before it arrived.
    GrantVoid,
    /// A lock is lost by its deadline.
    Expire,
    /// A renewal hears that the lock is gone.
    RenewalLost,
    /// A notice says that a lock that is held was taken away.
    TakenAway,
    /// A release is repeated, since an acquire was never answered.
    ReleaseInDoubt,
    /// A writer goes on as a reader.
    Downgrade,
    /// A holder is told that its time is over.
    Revoke,
    /// The machine takes no new claims.
    Close,
}

/// How often each transition was taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    #[cfg(feature = "simulation")]
    counts: std::collections::BTreeMap<Transition, u64>,
}

impl Coverage {
    #[cfg(feature = "simulation")]
    pub(crate) fn count(&mut self, transition: Transition) {
        *self.counts.entry(transition).or_default() += 1;
    }

    #[cfg(not(feature = "simulation"))]
    pub(crate) fn count(&mut self, _: Transition) {}

    /// How often this transition was taken.
    #[cfg(feature = "simulation")]
    pub fn of(&self, transition: Transition) -> u64 {
        self.counts.get(&transition).copied().unwrap_or(0)
    }

    /// Adds the counts of another machine.
    #[cfg(feature = "simulation")]
    pub fn add(&mut self, other: &Coverage) {
        for (transition, count) in &other.counts {
            *self.counts.entry(*transition).or_default() += count;
        }
    }
}
