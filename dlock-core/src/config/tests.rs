//! Tests of the configuration: every source, every bound, no secrets shown.

use super::values::read_password;
use super::*;
use crate::error::{ErrorKind, Result};

fn env(vars: &[(&str, &str)]) -> Result<Config> {
    let vars = vars.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Config::from_vars("DLOCK_", vars)
}

#[test]
fn every_source_says_the_same() {
    let file: Config =
        toml::from_str("url = 'memory://shop'\nttl = '5s'\nmax_waiters = 7\nwait = 'unlimited'")
            .unwrap();
    let url = Config::from_url("memory://shop?ttl=5s&max_waiters=7&wait=unlimited").unwrap();
    let vars = env(&[
        ("DLOCK_URL", "memory://shop"),
        ("DLOCK_TTL", "5s"),
        ("DLOCK_MAX_WAITERS", "7"),
        ("DLOCK_WAIT", "unlimited"),
        ("DLOCK_TOKEN", "41"),
        ("DLOCK_SERVICE_HOST", "10.0.0.1"),
        ("OTHER", "x"),
    ])
    .unwrap();
    assert_eq!(file, url);
    assert_eq!(url, vars);
}

#[test]
fn every_source_says_the_same_of_a_policy() {
    let file: Config = toml::from_str(
        "[policy.flash_sale]\nttl = '5s'\nwait = 'unlimited'\n[policy.payments]\nwait = '0s'",
    )
    .unwrap();
    let url = Config::from_url(
        "memory://?policy.flash_sale.ttl=5s&policy.flash_sale.wait=unlimited&policy.payments.wait=0s",
    )
    .unwrap();
    let vars = env(&[
        ("DLOCK_POLICY_FLASH_SALE_TTL", "5s"),
        ("DLOCK_POLICY_FLASH_SALE_WAIT", "unlimited"),
        ("DLOCK_POLICY_PAYMENTS_WAIT", "0s"),
    ])
    .unwrap();
    assert_eq!(file.policies, url.policies);
    assert_eq!(url.policies, vars.policies);
    let policy = Policy { ttl: Some(Duration::from_secs(5)), wait: Some(None) };
    assert_eq!(Settings::from(url.clone()).policy("flash_sale"), policy);
    assert_eq!(Settings::from(url.clone()).policy("unheard_of"), Policy::default());
}

#[test]
fn variables_override_the_query_of_the_url() {
    let config = env(&[("DLOCK_TTL", "7s"), ("DLOCK_URL", "memory://?ttl=5s")]).unwrap();
    assert_eq!(config.ttl, Some(Duration::from_secs(7)));
}

#[test]
fn faults_name_what_is_valid() {
    let says = |result: Result<Config>, words: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(words), "{error}");
    };
    says(Config::from_url("carrier-pigeon://x"), "memory://");
    says(Config::from_url("memory://?color=red"), "namespace, ttl, wait");
    says(Config::from_url("no url at all"), "write for example redis://");
    says(Config::from_url("memory://?ttl=soon"), "such as 150ms, 30s");
    says(env(&[("DLOCK_NAMESPCE", "x")]), "unknown option `namespce`");
    says(Config::from_url("memory://?max_waiters=-1"), "max_waiters");
    says(Config::from_url("memory://?policy.a.color=red"), "policy.NAME.ttl");
    says(Config::from_url("memory://?policy.ttl=1s"), "policy.NAME.ttl");
    says(Config::from_url("memory://?policy.A-b.ttl=1s"), "lower-case letters");
    says(Config::from_url("memory://?policy.a.ttl=soon"), "`policy.a.ttl`");
    says(env(&[("DLOCK_POLICY_A_COLOR", "red")]), "policy.NAME.ttl");
}

#[test]
fn bounds_are_checked() {
    let check = |url: &str| Config::from_url(url).and_then(|config| Settings::from(config).check());
    for url in [
        "memory://?ttl=0s",
        "memory://?ttl=25h",
        "memory://?policy.a.ttl=25h",
        "memory://?call_timeout=0s",
        "memory://?max_waiters=0",
        "memory://?namespace=a%20b",
        "memory://?namespace=",
        "memory://?client_name=",
    ] {
        assert_eq!(check(url).unwrap_err().kind(), ErrorKind::Config, "{url}");
    }
    check("memory://?ttl=24h").unwrap();
}

#[test]
fn secrets_are_not_shown() {
    let config =
        Config { url: Some("redis://u:hunter2@h/0?x=hunter2".into()), ..Config::default() };
    assert!(!format!("{config:?}").contains("hunter2"));
    let error = Config::from_url("rediz://u:hunter2@h").unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"));
    let error = Config::from_url("://u:hunter2@h").unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"));
}

#[test]
fn the_password_file_is_read() {
    let path = std::env::temp_dir().join(format!("dlock-password-{}", std::process::id()));
    std::fs::write(&path, "hunter2\n").unwrap();
    let mut config = Settings::from(Config::from_url("memory://").unwrap());
    config.password_file = Some(path.clone());
    assert_eq!(read_password(&path).unwrap(), "hunter2");
    let error = config.backend().map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("no users or passwords"), "{error}");
    std::fs::remove_file(&path).unwrap();
    config.password_file = Some(path);
    assert!(config.backend().map(|_| ()).unwrap_err().to_string().contains("cannot read"));
}

#[test]
fn the_later_configuration_wins_only_where_it_says_something() {
    let mut config =
        Config::from_url("memory://shop?ttl=5s&policy.a.ttl=1s&policy.a.wait=2s").unwrap();
    config.merge(env(&[]).unwrap());
    assert_eq!(config.url.as_deref(), Some("memory://shop"));
    config.merge(env(&[("DLOCK_WAIT", "unlimited"), ("DLOCK_POLICY_A_TTL", "3s")]).unwrap());
    let expected =
        Config::from_url("memory://shop?ttl=5s&wait=unlimited&policy.a.ttl=3s&policy.a.wait=2s");
    assert_eq!(config, expected.unwrap());
    // The default is a value like any other once somebody says it.
    config.merge(env(&[("DLOCK_TTL", "30s")]).unwrap());
    assert_eq!(config.ttl, Some(Duration::from_secs(30)));
}

#[test]
fn no_backend_is_chosen_silently() {
    let error = Settings::from(env(&[]).unwrap()).backend().map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("no backend is configured; set `url`"), "{error}");
}

#[cfg(feature = "redis")]
#[test]
fn urls_that_are_almost_right_say_what_was_meant() {
    for (url, meant) in [
        ("reids://localhost", "did you mean redis://?"),
        ("redsi://localhost", "did you mean redis://?"),
        ("redis+unx:///run/redis.sock", "did you mean redis+unix://?"),
        ("unix:///run/redis.sock", "did you mean redis+unix://?"),
        ("valkey://localhost", "did you mean redis://?"),
        ("momory://", "did you mean memory://?"),
        ("rediss:/hunter2@localhost", "write rediss://"),
        ("redis:localhost:6379", "write redis://"),
        ("localhost:6379", "write for example redis:// before the host"),
        ("user:hunter2@localhost", "write for example redis:// before the host"),
        ("localhost", "write for example redis:// before the host"),
        ("/run/redis.sock", "write redis+unix:// before the path"),
        ("", "the URL is empty"),
    ] {
        let error = Config::from_url(url).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{url}");
        assert!(error.to_string().contains(meant), "{url}: {error}");
        assert!(!error.to_string().contains("hunter2"), "{url}: {error}");
    }
}
