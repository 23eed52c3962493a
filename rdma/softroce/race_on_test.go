//go:build race

package softroce

const raceEnabled = true
