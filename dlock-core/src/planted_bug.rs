//! Bugs on purpose. A checker that never fails proves nothing, so the
//! simulation switches on one of these and must find it.

/// One planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is explained where it is planted")]
pub enum Bug {
    ReleaseWithoutOwnerCheck,
    LeaseCountedFromReply,
    OneShotRenewal,
    KeeperStopsAfterError,
    HandoverCountedFromReceipt,
    HandoverIgnoresDeadline,
    ReleaseOvertakesAcquire,
    LostWakeup,
    TokensRestart,
    DeadWaitersStay,
    ReadersAdmitWriter,
    CancelForgetsGrant,
    UnfencedWrite,
    BreakWithoutDelay,
    EarlyLossForgotten,
    SiblingsEnterTogether,
    CloseKeepsWaiters,
    RevokeSkipsOne,
    ExtensionWithoutRenewal,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 19] = [
        Bug::ReleaseWithoutOwnerCheck,
        Bug::LeaseCountedFromReply,
        Bug::OneShotRenewal,
        Bug::KeeperStopsAfterError,
        Bug::HandoverCountedFromReceipt,
        Bug::HandoverIgnoresDeadline,
        Bug::ReleaseOvertakesAcquire,
        Bug::LostWakeup,
        Bug::TokensRestart,
        Bug::DeadWaitersStay,
        Bug::ReadersAdmitWriter,
        Bug::CancelForgetsGrant,
        Bug::UnfencedWrite,
        Bug::BreakWithoutDelay,
        Bug::EarlyLossForgotten,
        Bug::SiblingsEnterTogether,
        Bug::CloseKeepsWaiters,
        Bug::RevokeSkipsOne,
        Bug::ExtensionWithoutRenewal,
    ];
}

/// The bug planted in a machine. Outside the simulation there is no way to set one, and
/// asking costs nothing.
#[derive(Clone, Copy, Debug)]
pub struct PlantedBug<B = Bug> {
    #[cfg(feature = "simulation")]
    bug: Option<B>,
    #[cfg(not(feature = "simulation"))]
    none: std::marker::PhantomData<B>,
}

impl<B> Default for PlantedBug<B> {
    fn default() -> Self {
        PlantedBug {
            #[cfg(feature = "simulation")]
            bug: None,
            #[cfg(not(feature = "simulation"))]
            none: std::marker::PhantomData,
        }
    }
}

impl<B: Copy + PartialEq> PlantedBug<B> {
    /// A machine with this bug.
    #[cfg(feature = "simulation")]
    pub fn with(bug: Option<B>) -> Self {
        PlantedBug { bug }
    }

    /// Whether the machine has this bug.
    #[cfg(feature = "simulation")]
    pub fn is(self, bug: B) -> bool {
        self.bug == Some(bug)
    }

    /// Whether the machine has this bug.
    #[cfg(not(feature = "simulation"))]
    pub fn is(self, _: B) -> bool {
        false
    }
}
