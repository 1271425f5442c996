//! Bugs on purpose. A checker that never fails proves nothing, so the
//! simulation switches on one of these and must find it.

/// One planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is explained where it is planted")]
pub enum Plant {
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
}

impl Plant {
    /// All of them.
    pub const ALL: [Plant; 13] = [
        Plant::ReleaseWithoutOwnerCheck,
        Plant::LeaseCountedFromReply,
        Plant::OneShotRenewal,
        Plant::KeeperStopsAfterError,
        Plant::HandoverCountedFromReceipt,
        Plant::HandoverIgnoresDeadline,
        Plant::ReleaseOvertakesAcquire,
        Plant::LostWakeup,
        Plant::TokensRestart,
        Plant::DeadWaitersStay,
        Plant::ReadersAdmitWriter,
        Plant::CancelForgetsGrant,
        Plant::UnfencedWrite,
    ];
}

/// The bug planted in a machine. Outside the simulation there is no way to set
/// one, and asking costs nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Planted {
    #[cfg(feature = "simulation")]
    bug: Option<Plant>,
}

impl Planted {
    /// A machine with this bug.
    #[cfg(feature = "simulation")]
    pub fn with(bug: Option<Plant>) -> Self {
        Planted { bug }
    }

    #[cfg(feature = "simulation")]
    pub(crate) fn is(self, bug: Plant) -> bool {
        self.bug == Some(bug)
    }

    #[cfg(not(feature = "simulation"))]
    pub(crate) const fn is(self, _: Plant) -> bool {
        false
    }
}
