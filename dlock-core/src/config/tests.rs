//! Tests of the configuration: every source, every bound, no secrets shown.

use super::values::read_password;
use super::*;
use crate::error::{ErrorKind, Result};

fn env(vars: &[(&str, &str)]) -> Result<Config> {
    let vars = vars.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Config::from_vars("DLOCK_", vars)
}

/// What a file, a URL and the environment say.
fn sources(file: &str, url: &str, vars: &[(&str, &str)]) -> [Config; 3] {
    [toml::from_str(file).unwrap(), Config::from_url(url).unwrap(), env(vars).unwrap()]
}

#[test]
fn every_source_says_the_same() {
    let [file, url, vars] = sources(
        "url = 'memory://shop'\nttl = '5s'\nmax_waiters = 7\nwait = 'unlimited'",
        "memory://shop?ttl=5s&max_waiters=7&wait=unlimited",
        &[
            ("DLOCK_URL", "memory://shop"),
            ("DLOCK_TTL", "5s"),
            ("DLOCK_MAX_WAITERS", "7"),
            ("DLOCK_WAIT", "unlimited"),
            ("DLOCK_TOKEN", "41"),
            ("DLOCK_SERVICE_HOST", "10.0.0.1"),
            ("OTHER", "x"),
        ],
    );
    assert_eq!(file, url);
    assert_eq!(url, vars);
}

#[test]
fn every_source_says_the_same_of_a_policy() {
    let [file, url, vars] = sources(
        "[policy.flash_sale]\nttl = '5s'\nwait = 'unlimited'\n[policy.payments]\nwait = '0s'",
        "memory://?policy.flash_sale.ttl=5s&policy.flash_sale.wait=unlimited&policy.payments.wait=0s",
        &[
            ("DLOCK_POLICY_FLASH_SALE_TTL", "5s"),
            ("DLOCK_POLICY_FLASH_SALE_WAIT", "unlimited"),
            ("DLOCK_POLICY_PAYMENTS_WAIT", "0s"),
        ],
    );
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
    says(
        env(&[("DLOCK_NAMESPCE", "x")]),
        "configure: invalid configuration: DLOCK_NAMESPCE: unknown option `namespce`; did you mean `namespace`?",
    );
    says(Config::from_url("memory://?tll=3s"), "unknown option `tll`; did you mean `ttl`? (the");
    says(Config::from_url("memory://?colour=red"), "unknown option `colour` (the options are");
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

#[cfg(feature = "redis")]
#[test]
fn a_url_may_name_several_hosts() {
    let text = "redis+sentinel://u:p%2Cw@a:7000,b,[::1]:7002/mymaster/3?ttl=5s&sentinel.user=ops";
    let config = Config::from_url(text).unwrap();
    assert_eq!(config.ttl, Some(Duration::from_secs(5)));
    assert_eq!(config.sentinel.user.as_deref(), Some("ops"));
    let url = config.url.clone().unwrap();
    let parsed = parse_url(&url).unwrap();
    let host = |name: &str, port| (name.to_owned(), port);
    assert_eq!(parsed.hosts, [host("a", 7000), host("b", 26379), host("::1", 7002)]);
    assert_eq!(parsed.url.path(), "/mymaster/3");
    assert_eq!(parsed.url.username(), "u");
    assert_eq!(redacted(&url), "redis+sentinel://a:7000,b,[::1]:7002/mymaster/3");
    assert!(!format!("{config:?}").contains("p%2Cw"));
    let one = Config::from_url("redis+sentinel://a/mymaster").unwrap();
    assert_eq!(parse_url(one.url.as_deref().unwrap()).unwrap().hosts, [host("a", 26379)]);
    assert_eq!(redacted("redis://u:p@h:1/0?x=y"), "redis://h:1/0");
}

#[cfg(feature = "redis")]
#[test]
fn faults_of_a_url_with_several_hosts() {
    let says = |url: &str, words: &str| {
        let result = Config::from_url(url).and_then(|config| Settings::from(config).backend());
        let error = result.map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(words), "{error}");
        assert!(!error.to_string().contains("hunter2"), "{error}");
    };
    says("redis+sentinel://:hunter2@a,,b/mymaster", "host 2 in the list");
    says("redis+sentinel://:hunter2@a:x/mymaster", "host 1 in the list");
    says("redis+sentinel://a,b", "redis+sentinel://host1,host2,host3/mymaster");
    says("redis+sentinel://a/mymaster/x", "the number of a database");
    says("redis-sentinel://a/mymaster", "did you mean redis+sentinel://?");
    says("redis://a,b", "redis+sentinel://");
    says("redis://a?sentinel.user=x", "`sentinel.*`");
    says("redis+sentinel://a/m?sentinel.tls=maybe", "`yes` or `no`");
    says("redis+sentinel://a/m?sentinel.tls_ca=/none", "rediss+sentinel://");
}

#[cfg(feature = "redis")]
#[test]
fn every_source_says_the_same_of_the_sentinels() {
    let [file, url, vars] = sources(
        "min_replicas = 1\n[sentinel]\nuser = 'ops'\ntls = true\ntls_ca = '/ca'\npassword = 'x'",
        "redis://h?min_replicas=1&sentinel.user=ops&sentinel.tls=yes&sentinel.tls_ca=/ca&sentinel.password=x",
        &[
            ("DLOCK_MIN_REPLICAS", "1"),
            ("DLOCK_SENTINEL_USER", "ops"),
            ("DLOCK_SENTINEL_TLS", "yes"),
            ("DLOCK_SENTINEL_TLS_CA", "/ca"),
            ("DLOCK_SENTINEL_PASSWORD", "x"),
        ],
    );
    assert_eq!(file.sentinel, url.sentinel);
    assert_eq!(url.sentinel, vars.sentinel);
    assert_eq!((file.min_replicas, vars.min_replicas), (Some(1), Some(1)));
    let mut merged = Config::default();
    merged.merge(vars.clone());
    assert_eq!(merged, vars);
    assert!(!format!("{:?}", url.sentinel).contains('x'));
}
