//! Warns whoever is about to wait for unoptimised arithmetic. A profile of this package counts only
//! where it is the one being built: a program that depends on it must say so itself.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let level = std::env::var("OPT_LEVEL").unwrap_or_default();
    if level == "0" || level == "1" {
        println!(
            "cargo::warning=neighbors-core is compiled at opt-level {level}, which makes datafusion-neighbors tens of \
             times slower; add [profile.dev.package.neighbors-core] opt-level = 3 to the Cargo.toml \
             of your workspace"
        );
    }
}
