//! The scripts of a quorum.

use std::sync::OnceLock;

use super::super::scripts::Code;

macro_rules! at_a_node {
    ($file:literal) => {
        concat!(
            include_str!("../lua/redlock_node.lua"),
            include_str!(concat!("../lua/", $file, ".lua"))
        )
    };
}

/// The scripts with their digests.
pub(super) struct QuorumScripts {
    /// Votes, renewals and what takes them back.
    pub(super) calls: Code,
    pub(super) hello: Code,
    pub(super) inspect: Code,
}

impl QuorumScripts {
    pub(super) fn get() -> &'static Self {
        static SCRIPTS: OnceLock<QuorumScripts> = OnceLock::new();
        SCRIPTS.get_or_init(|| QuorumScripts {
            calls: Code::new(concat!(
                include_str!("../lua/redlock_first.lua"),
                at_a_node!("redlock_calls")
            )),
            hello: Code::new(at_a_node!("redlock_hello")),
            inspect: Code::new(at_a_node!("redlock_inspect")),
        })
    }
}
